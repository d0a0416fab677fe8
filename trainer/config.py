"""How rollouts are made: frozen, complete, nothing unknown let through. Field descriptions are the documentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from gateway.config.models import Frozen


class RolloutLimits(Frozen):
    """Where a rollout ends if nothing else ends it; each limit has a stop reason of its own."""

    assistant_turns: PositiveInt = 8
    """Turns that the policy writes."""
    user_turns: NonNegativeInt = 8
    """Turns in which an interaction or a plug-in answers it."""
    tool_calls: NonNegativeInt = 32
    """Calls in all; a turn that would go past this is not carried out."""
    invalid_turns: PositiveInt = 3
    """Turns in a row whose calls no tool could take."""
    turn_tokens: PositiveInt = 512
    """Tokens of one turn."""
    rollout_tokens: PositiveInt = 4096
    """Tokens of everything, the prompt included."""
    wall_s: PositiveFloat = 600.0
    """Seconds from the first to the last."""


class GroupRules(Frozen):
    """What becomes of a group when infrastructure fails one of its rollouts. Nothing of it is ever scored."""

    on_failure: Literal["refill", "drop", "rest"] = "refill"
    """`refill`: the rollout is made anew; `drop`: the whole group is left out; `rest`: its siblings stay."""
    refills: Annotated[int, Field(ge=0, le=10)] = 2
    """How often one rollout is made anew before its group has to do without it."""


class Admission(Frozen):
    """How much goes on at once."""

    open: PositiveInt = 256
    """Rollouts that are under way, those that wait for a tool included."""
    writing: PositiveInt = 64
    """Rollouts that the engine writes for; one that waits for a tool lends its place to the next."""

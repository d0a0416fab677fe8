"""Settings of the reward: its components, their weights and deadlines, and what counts as success."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, PositiveFloat, model_validator

from gateway.config.base import FrozenModel

ComponentName = Annotated[str, Field(pattern=r"^\w[\w./-]*$")]
RESERVED_NAMES = frozenset({"mean", "std", "failed"})
"""Other metrics under `reward/`, which a component may not be named after."""


class ComponentSettings(FrozenModel):
    """Reward functions by name, each with its weight; by default `answer: {function: answer}`."""

    function: Annotated[str, Field(min_length=1)]
    """A built-in function (`answer`, `exact`, `state_equals`, `solved`, `outcome`, `tools`, `feedback`, `calc_reward`,
    `agent`, `efficiency`, `tool_quality`, `judge`), or your own: `module:name`, or `folder/rewards.py:name`. It takes
    a `trainer.reward.attempt:Attempt` and returns a number. It may be async; it then runs in an event loop of its own,
    the same from call to call, so what it opens there cannot be shared with another function or with tools."""
    weight: float = 1.0
    """The score is multiplied by this; with 0 it is measured, but not rewarded."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    batched: bool = False
    """The function takes a list of all attempts of a group, and returns a list of numbers in the same order."""
    timeout_s: PositiveFloat = 30.0
    """Seconds after which a call is given up and its rollouts are left out. An async function that blocks its event
    loop delays only its own other calls, which are left out too."""


class RewardSettings(FrozenModel):
    """The reward is the weighted sum of components; each is a metric of its own."""

    components: Annotated[dict[ComponentName, ComponentSettings], Field(min_length=1)] = {
        "answer": ComponentSettings(function="answer")
    }
    success: str | None = None
    """The component that decides whether a rollout succeeded; by default the first."""
    success_at: float = 1.0
    """A rollout succeeded if that component's unweighted score is at least this."""

    @property
    def success_component(self) -> str:
        """The component that decides success."""
        return self.success or next(iter(self.components))

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if taken := sorted(RESERVED_NAMES & set(self.components)):
            raise ValueError(f"the component name {taken[0]!r} is reserved for a metric of all components; rename it")
        if self.success_component not in self.components:
            raise ValueError(f"success is {self.success!r}, which is none of {', '.join(self.components)}")
        return self

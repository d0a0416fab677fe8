"""A finished rollout: its ledgers, why it stopped, its rewards and timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum
from typing import Any, NamedTuple

from gateway.types import EMPTY
from trainer.ledger import Entry, Ledger

EXCLUDED_SPANS = "left_out"
"""The key in a policy entry's info for the spans of its ids that a plug-in excluded from the loss."""


IGNORED_CALLS = "ignored_calls"
"""The key in a policy entry's info for how many calls of the turn were not made, as it was asked for something else."""
COUNTS_INFO = "counts"
"""What graders counted beside the rewards, by name."""
STATES_INFO = "states"
"""The key in a rollout's infos for the hashes of the states that its servers and sandboxes ended with."""
CHANGED_BY_AGENT = "changed_by_agent"
"""The key in a policy entry's info for what an agent changed in the turn before it sent it back."""


class StopReason(StrEnum):
    """Why a rollout ended; the only place that says so."""

    DONE = "done"
    """The policy finished: a turn without a call, in a task without an interaction."""
    TOOL_DONE = "tool_done"
    FEEDBACK_DONE = "feedback_done"
    STEP_DONE = "step_done"
    """The stepper found the rollout finished."""
    LENGTH_TURN = "length_turn"
    """The turn was truncated at `limits.turn_tokens`."""
    LENGTH_ROLLOUT = "length_rollout"
    """The next tokens exceeded `limits.rollout_tokens` or the engine's context."""
    ASSISTANT_TURNS = "assistant_turns"
    USER_TURNS = "user_turns"
    TOOL_CALLS = "tool_calls"
    INVALID_CALLS = "invalid_calls"
    """The policy wrote too many turns in a row with nothing but invalid calls."""
    WALL_TIME = "wall_time"
    ENGINE_FAILED = "engine_failed"
    TOOL_FAILED = "tool_failed"
    """A tool, an interaction or its server broke; a tool that returns an error does not count."""
    MISALIGNED = "misaligned"
    """The engine counted other prompt tokens than the ledger: it expands images to other widths."""
    AGENT_FAILED = "agent_failed"
    """An agent that plays the rollout failed, or ended without asking the policy."""
    WORKER_LOST = "worker_lost"
    """The rollout worker that played it ended, or said nothing for too long."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """A bug around the policy: in a plug-in, a template, or mtrl itself."""

    @property
    def is_infrastructure(self) -> bool:
        """True if the policy is not to blame; such a rollout is never scored."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        StopReason.WALL_TIME,  # The speed of a machine says nothing about the policy.
        StopReason.ENGINE_FAILED,
        StopReason.TOOL_FAILED,
        StopReason.MISALIGNED,
        StopReason.AGENT_FAILED,
        StopReason.WORKER_LOST,
        StopReason.CANCELLED,
        StopReason.ERROR,
    }
)


class Span(NamedTuple):
    """A phase of a rollout: `queueing`, `generating`, `calling` or `interacting`."""

    phase: str
    start_s: float
    """Since the start of the rollout."""
    duration_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at one task. `infos` and `timing` hold JSON values, as do an entry's messages and info."""

    task: str
    """The task's id."""
    ledger: Ledger
    stop: StopReason
    group: str = ""
    """The name of the group of attempts that are compared with each other."""
    index: int = 0
    """The number of the attempt in its group."""
    step: int | None = None
    """The training step that used it, if the group's name does not contain it."""
    rewards: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    """The reward of each component; empty if not scored."""
    weighted_reward: float | None = None
    """The weighted sum of the components, which the algorithm sees; None if no weights were applied."""
    kind: str = ""
    """The task's kind, if its row has one."""
    reason: str = ""
    """What failed, for the operator."""
    timing: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    """Seconds in each phase."""
    timeline: tuple[Span, ...] = ()
    """The phases in order."""
    infos: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """What plug-ins passed on to the reward functions."""
    earlier: tuple[Ledger, ...] = ()
    """Ledgers before this one, oldest first. If the template rewrites the policy's history, as when it strips earlier
    reasoning, the next turn starts a new ledger; each holds exactly what the policy saw and wrote."""

    def __post_init__(self) -> None:
        if self.rewards and self.stop.is_infrastructure:
            raise ValueError(f"a rollout that ended with {self.stop} cannot have rewards: infrastructure failed")

    @property
    def name(self) -> str:
        """The name in messages: group, task and index."""
        return f"{self.group}/{self.task}/{self.index}"

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """All ledgers, oldest first."""
        return (*self.earlier, self.ledger)

    @property
    def turns(self) -> tuple[Entry, ...]:
        """The policy's entries of all ledgers."""
        return tuple(turn for ledger in self.ledgers for turn in ledger.turns)

    @property
    def reward(self) -> float | None:
        """The total reward; None if not scored."""
        return total_reward(self.rewards, self.weighted_reward)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that wrote it, without duplicates, oldest first."""
        last = {entry.version for entry in self.turns if entry.version is not None}
        return tuple(sorted(last.union(version for entry in self.turns for version, _ in entry.earlier_versions)))


def total_reward(rewards: Mapping[str, float], weighted: float | None) -> float | None:
    """The weighted reward, or else the plain sum of the components; None if not scored."""
    if not rewards:
        return None
    return fsum(rewards.values()) if weighted is None else weighted

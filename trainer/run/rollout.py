"""A rollout that is over is data: what was written, why it ended, and what that was worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum
from typing import Any, NamedTuple

from trainer.ledger import NOTHING, Entry, Ledger

LEFT_OUT = "left_out"
"""Of the information of a policy's turn, the spans of its ids that nothing is learned from: a plug-in said so."""


class StopReason(StrEnum):
    """Why a rollout ended. Nothing else says so: no metric and no text is asked."""

    DONE = "done"
    """The policy finished: a turn without a call, and nobody answered it."""
    TOOL_DONE = "tool_done"
    FEEDBACK_DONE = "feedback_done"
    STEP_DONE = "step_done"
    """The plug-in between two turns found the rollout finished."""
    LENGTH_TURN = "length_turn"
    """The turn was cut off at its most tokens."""
    LENGTH_ROLLOUT = "length_rollout"
    """What came next did not fit, by the rollout's most tokens or the engine's context."""
    ASSISTANT_TURNS = "assistant_turns"
    USER_TURNS = "user_turns"
    TOOL_CALLS = "tool_calls"
    INVALID_CALLS = "invalid_calls"
    """The policy wrote one call after the other that no tool could take."""
    WALL_TIME = "wall_time"
    ENGINE_FAILED = "engine_failed"
    TOOL_FAILED = "tool_failed"
    """A tool, an interaction or its server broke; a tool that says no is none of this."""
    MISALIGNED = "misaligned"
    """The engine counted other ids than the ledger holds: its images are of other widths."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """A mistake in what surrounds the policy: a plug-in, a template, mtrl itself."""

    @property
    def infrastructure(self) -> bool:
        """True where the policy is not to blame: such a rollout is never scored."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {
        StopReason.WALL_TIME,  # How fast a machine is says nothing of what the policy wrote.
        StopReason.ENGINE_FAILED,
        StopReason.TOOL_FAILED,
        StopReason.MISALIGNED,
        StopReason.CANCELLED,
        StopReason.ERROR,
    }
)


class Span(NamedTuple):
    """A phase of a rollout: `queueing`, `generating`, `calling` or `interacting`."""

    phase: str
    began_s: float
    """Since the rollout began."""
    spent_s: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at one task. `infos` and `timing` hold JSON values, as do an entry's messages and info."""

    task: str
    """The task's id."""
    ledger: Ledger
    stop: StopReason
    group: str = ""
    """Names the attempts that are compared with each other."""
    index: int = 0
    """Which one of its group."""
    step: int | None = None
    """The step that learned from it, where its group's name does not tell."""
    rewards: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """What it is worth, by component; empty where it was not scored."""
    weighed: float | None = None
    """The components as their weights sum them: what an algorithm sees. None where nobody weighed them."""
    kind: str = ""
    """Of the task, where its row tells."""
    reason: str = ""
    """For the operator: what failed."""
    timing: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """Seconds by phase."""
    timeline: tuple[Span, ...] = ()
    """Each phase as it came."""
    infos: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """What plug-ins passed on to the reward functions."""
    earlier: tuple[Ledger, ...] = ()
    """Ledgers that this one does not begin with, oldest first: where the template takes back what the policy wrote,
    the next turn begins anew, and each ledger is what the policy saw and wrote."""

    def __post_init__(self) -> None:
        if self.rewards and self.stop.infrastructure:
            raise ValueError(f"a rollout that ended with {self.stop} says nothing of the policy and has no rewards")

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.group}/{self.task}/{self.index}"

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """All of them, oldest first."""
        return (*self.earlier, self.ledger)

    @property
    def turns(self) -> tuple[Entry, ...]:
        """The policy's, over all ledgers."""
        return tuple(turn for ledger in self.ledgers for turn in ledger.turns)

    @property
    def reward(self) -> float | None:
        return worth(self.rewards, self.weighed)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy's versions that wrote it, each once, oldest first."""
        known = {entry.version for entry in self.turns if entry.version is not None}
        return tuple(sorted(known.union(version for entry in self.turns for version, _ in entry.before)))


def worth(rewards: Mapping[str, float], weighed: float | None) -> float | None:
    """One number, the same wherever it is told: the weighed one, or else the plain sum; None of what was not scored."""
    if not rewards:
        return None
    return fsum(rewards.values()) if weighed is None else weighed

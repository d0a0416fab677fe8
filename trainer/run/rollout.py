"""A rollout that is over is data: what was written, why it ended, and what that was worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import fsum
from typing import Any

from trainer.ledger import NOTHING, Entry, Ledger


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
        StopReason.CANCELLED,
        StopReason.ERROR,
    }
)


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
    rewards: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """What it is worth, by component; empty where it was not scored."""
    reason: str = ""
    """For the operator: what failed."""
    timing: Mapping[str, float] = field(default_factory=lambda: NOTHING)
    """Seconds by phase."""
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
        """The components' plain sum; None where it was not scored."""
        return fsum(self.rewards.values()) if self.rewards else None

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy's versions that wrote it, each once, oldest first."""
        return tuple(sorted({entry.version for entry in self.turns if entry.version is not None}))

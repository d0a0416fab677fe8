"""The parts of a memory plan, and the phases of a run in which each is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.policy.errors import PolicyError

GIB = 1024**3
SMALLER_MODEL = "use a smaller model"
Phase = Literal["loading", "generating", "pass", "end of a pass", "optimizer step", "publishing"]
"""What a run does, one after the other; in modes that generate during updates, parts of generating are in all."""
PHASES: tuple[Phase, ...] = get_args(Phase)
LOADED: tuple[Phase, ...] = ("generating", "pass", "end of a pass", "optimizer step", "publishing")
"""All but loading."""
UPDATE: tuple[Phase, ...] = ("pass", "end of a pass", "optimizer step")


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory, with the setting that lowers it."""

    name: str
    size: int
    """Bytes."""
    remedy: str = SMALLER_MODEL
    """What makes it smaller; empty if it shrinks with another part."""
    during: tuple[Phase, ...] = PHASES
    """The phases in which it is in memory."""
    note: str = ""
    """What cannot be known in advance: shown, but not counted."""

    @property
    def is_transient(self) -> bool:
        """Whether it exists only while weights are updated or published, not while rollouts are generated."""
        return "generating" not in self.during

    def __str__(self) -> str:
        return f"{self.name} {self.size / GIB:.2f} GiB{self.note}"


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory at its peak."""

    parts: tuple[MemoryPart, ...]
    available: int
    taken: int = 0
    """What the process has taken already, with its libraries."""

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most."""
        return max(PHASES, key=self.needed_during)

    def needed_during(self, phase: Phase) -> int:
        """The bytes of all parts that are in memory in a phase."""
        return sum(part.size for part in self.parts if phase in part.during)

    @property
    def needed(self) -> int:
        """What is needed at once, in the phase that needs the most."""
        return self.needed_during(self.peak_phase)

    @property
    def peak(self) -> int:
        """The process's memory at its peak."""
        return self.taken + self.needed

    @property
    def fits(self) -> bool:
        return self.needed < self.available

    @property
    def remedy(self) -> str:
        """How to lower the largest parts, the largest first; empty if the plan fits."""
        peak = self.peak_phase
        return "" if self.fits else join_remedies([part for part in self.parts if peak in part.during])

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        most = f"at most {self.needed / GIB:.2f} GiB at once ({self.peak_phase})"
        return f"memory: {parts}; {most}, of {self.available / GIB:.2f} GiB that are free"

    def require(self) -> None:
        """Raises PolicyError if the plan does not fit."""
        if not self.fits:
            raise PolicyError(f"this run does not fit: {self}", self.remedy)


def join_remedies(parts: Sequence[MemoryPart]) -> str:
    """How to lower the parts that are a tenth of all or more, the largest first; parts that follow others have none."""
    total = sum(part.size for part in parts)
    largest = sorted(parts, key=lambda part: -part.size)
    return "; ".join(f"{part.remedy} ({part})" for part in largest if part.remedy and part.size * 10 > total)

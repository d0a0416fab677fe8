"""Counts of sandboxes in this process, for `/healthz` and the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class SandboxStatistics:
    """Sandboxes that were started and refused, the time that starts took, and limits that were hit."""

    starts: int = 0
    start_s: float = 0.0
    """Seconds of all starts together."""
    running: int = 0
    machines: Counter[str] = field(default_factory=Counter)
    """Those that run on other machines, by machine."""
    refusals: int = 0
    without_group: int = 0
    """Sandboxes without a control group: their limits hold for each process."""
    limits_hit: Counter[str] = field(default_factory=Counter)
    """By limit."""
    grades: Counter[str] = field(default_factory=Counter)
    """How sandboxes were graded: `graded`, why there was no reward, `unavailable`; and `planted` rewards."""

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        counters = {name: dict(getattr(self, name)) for name in ("machines", "limits_hit", "grades")}
        return {**asdict(self), **counters}


STATISTICS = SandboxStatistics()
"""Of all gateways of this process."""


def count_start(seconds: float, machine: str = "") -> None:
    """Counts a sandbox that has started, on another machine if one is named."""
    STATISTICS.starts += 1
    STATISTICS.running += 1
    STATISTICS.machines.update([machine] if machine else [])
    STATISTICS.start_s += seconds


def count_end(machine: str = "") -> None:
    """Counts the end of a sandbox that had started."""
    STATISTICS.running -= 1
    STATISTICS.machines -= Counter([machine] if machine else [])  # None stays whose last one has ended.


def count_hits(hits: Mapping[str, int]) -> None:
    """Counts limits that were hit."""
    STATISTICS.limits_hit.update({name: count for name, count in hits.items() if count})

"""What ranks have to tell each other, for a policy that trains alone or on several; metrics by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Ranks(Protocol):
    """Sums and collects values over ranks. Every rank must make the same calls in the same order."""

    rank: int
    size: int

    @property
    def shares(self) -> int:
        """The number of shares that a step's rows are dealt into: as many as ranks, without tensor parallelism."""
        ...

    @property
    def share(self) -> int:
        """Which of them this rank computes."""
        ...

    def add(self, values: Sequence[float]) -> list[float]:
        """The sum over shares of each value, in double precision; the same on every rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, which JSON can hold, in the order of ranks."""
        ...

    def take_busy_s(self) -> float:
        """Seconds that this rank computed since the last call, without waiting for others."""
        ...

    def report(self, stage: str) -> None:
        """Notes what this rank does now, for the error message if it gets stuck."""
        ...


class OneRank:
    """A single process, which shares its work with nobody."""

    rank = share = 0
    size = shares = 1

    def add(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def take_busy_s(self) -> float:
        return 0.0

    def report(self, stage: str) -> None:
        pass


ONE_RANK = OneRank()


def measure_ranks(ranks: Ranks, tokens: int) -> dict[str, float]:
    """The same metrics on every rank. `tokens` are those of its share, which some ranks compute together."""
    measured = [(float(busy_s), int(count)) for busy_s, count in ranks.gather([ranks.take_busy_s(), tokens])]
    longest = max(busy_s for busy_s, _ in measured)
    metrics = {}
    for rank, (busy_s, count) in enumerate(measured):
        metrics[f"distributed/busy_s/rank_{rank}"] = busy_s
        if longest:
            metrics[f"distributed/idle/rank_{rank}"] = 1 - busy_s / longest
        if busy_s and count:
            metrics[f"distributed/tokens_per_s/rank_{rank}"] = count * ranks.shares / ranks.size / busy_s
    return metrics

"""Splits packed rows into micro-batches, deterministically, and averages metrics over them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer.policy.ranks import Ranks


def split_micro_batches(sizes: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Groups neighbours with at most `max_tokens` together; a longer row is alone."""
    start, tokens = 0, 0
    for index, size in enumerate(sizes):
        if index > start and tokens + size > max_tokens:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += size
    if sizes:
        yield slice(start, len(sizes))


def split_evenly(rows: int, parts: int) -> Iterator[slice]:
    """Splits rows into parts of almost equal size, none of them empty."""
    parts = min(parts, rows)
    for part in range(parts):
        yield slice(rows * part // parts, rows * (part + 1) // parts)


class MetricMeans:
    """Weighted means of metrics over micro-batches; a name that ends in `max` is a maximum."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        for name, value in metrics.items():
            if name.endswith("max"):
                self._maxima[name] = max(value, self._maxima.get(name, value))
            elif weight:
                self._sums[name] = self._sums.get(name, 0.0) + value * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def merge(self, ranks: Ranks) -> None:
        """Includes what the other ranks added."""
        sums, weights, maxima = zip(*ranks.gather([self._sums, self._weights, self._maxima]), strict=True)
        self._sums, self._weights = _combine(sums, operator.add), _combine(weights, operator.add)
        self._maxima = _combine(maxima, max)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value / self._weights[name] for name, value in self._sums.items()} | self._maxima


def _combine(parts: Sequence[Mapping[str, float]], combine: Callable[[float, float], float]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for name, value in (item for part in parts for item in part.items()):
        combined[name] = combine(combined[name], value) if name in combined else value
    return combined

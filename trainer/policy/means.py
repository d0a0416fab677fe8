"""What micro-batches tell of themselves is told of all of them together."""

from __future__ import annotations

from collections.abc import Mapping


class Means:
    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._most: dict[str, float] = {}

    def add(self, told: Mapping[str, float], weight: float) -> None:
        """What ends in `max` is a largest one, and all else a mean of what weighs so much."""
        for name, value in told.items():
            if name.endswith("max"):
                self._most[name] = max(value, self._most.get(name, value))
            elif weight:
                self._sums[name] = self._sums.get(name, 0.0) + value * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    @property
    def told(self) -> dict[str, float]:
        return {name: value / self._weights[name] for name, value in self._sums.items()} | self._most

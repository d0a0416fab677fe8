"""Reads metrics of several steps: finite values, means, and rises that exceed what scatter explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, isfinite, sqrt

Metrics = Mapping[str, float]

STANDARD_ERRORS = 3.0
"""Standard errors by which a metric must have risen."""


def get_finite(metrics: Metrics, name: str) -> float | None:
    """A metric of a step, unless it is missing or not finite."""
    value = metrics.get(name)
    return value if value is not None and isfinite(value) else None


def _finite_values(history: Sequence[Metrics], name: str) -> list[float]:
    return [value for metrics in history if (value := get_finite(metrics, name)) is not None]


def mean_of(history: Sequence[Metrics], name: str) -> float | None:
    """A metric's mean over steps; None if no step has it."""
    values = _finite_values(history, name)
    return fsum(values) / len(values) if values else None


def find_rise(history: Sequence[Metrics], name: str) -> tuple[float, float] | None:
    """The means of the first and the last third, if the rise exceeds what their scatter explains."""
    values = _finite_values(history, name)
    third = len(values) // 3
    if third < 2:
        return None
    first, last = values[:third], values[-third:]
    (low, low_error), (high, high_error) = _mean_and_error(first), _mean_and_error(last)
    return (low, high) if high - low > STANDARD_ERRORS * sqrt(low_error + high_error) + 1e-9 else None


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its squared standard error."""
    mean = fsum(values) / len(values)
    return mean, fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)

"""What alarms are decided by: the metrics of a step and those before it, with their means and trends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, log, sqrt

from gateway.types import EMPTY

Metrics = Mapping[str, float]

STANDARD_ERRORS = 3.0
"""Standard errors by which a metric must have risen."""
UNTRAINED = 0.9
"""A model whose tokens are this close to equally likely has random weights; as a share of the largest entropy."""


@dataclass(frozen=True, slots=True)
class AlarmInput:
    """The metrics that alarms are decided by."""

    latest: Metrics
    history: Sequence[Metrics] = ()
    """Oldest first, `latest` included."""
    first_steps: Sequence[Metrics] = ()
    lost_reasons: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    """Why rollouts were lost, with the number for each reason."""
    group_size: int = 0
    """Rollouts of a task; 0 if it is unknown."""
    vocabulary: int = 0
    """The model's number of tokens; 0 if it is unknown."""

    @property
    def is_untrained(self) -> bool:
        """Whether the policy samples its tokens as if all were equally likely."""
        logprob = get_finite(self.latest, "rollout/logprob")
        return self.vocabulary > 1 and logprob is not None and -logprob >= UNTRAINED * log(self.vocabulary)


def format_alarm(seen: str, cause: str, remedy: str) -> str:
    """What was seen, its likely cause, and the remedy."""
    return f"{seen}\n  likely: {cause}\n  remedy: {remedy}"


def get_finite(metrics: Metrics, name: str) -> float | None:
    """The metric, if it is there and finite."""
    value = metrics.get(name)
    return value if value is not None and isfinite(value) else None


def finite_values(history: Sequence[Metrics], name: str) -> list[float]:
    """The metric of each step that has it."""
    return [value for metrics in history if (value := get_finite(metrics, name)) is not None]


def mean(history: Sequence[Metrics], name: str) -> float | None:
    """The mean over the steps that have the metric."""
    values = finite_values(history, name)
    return fsum(values) / len(values) if values else None


def find_rise(history: Sequence[Metrics], name: str) -> tuple[float, float] | None:
    """The means of the first and the last third, if the rise exceeds what their scatter explains."""
    values = finite_values(history, name)
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

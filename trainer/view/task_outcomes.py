"""Outcomes by task: pass@k and pass^k, intervals by bootstrap over tasks, and the comparison of two evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum
from random import Random
from typing import Any

RESAMPLES = 2000
"""Bootstrap samples of tasks."""
EVALUATION_FOLDER = "eval"
COMPARED = ("sampled", "greedy")
"""The evaluations of a run after training, which two runs are compared by."""


@dataclass(frozen=True, slots=True)
class Tries:
    """The scored tries of a task, and how many of them succeeded."""

    succeeded: int
    tried: int

    @property
    def rate(self) -> float:
        return self.succeeded / self.tried


Outcomes = Mapping[str, Tries]
"""By the ids of tasks."""


def count_tries(attempts: Iterable[tuple[str, bool]]) -> Outcomes:
    """The outcomes of attempts, each with its task's id and whether it succeeded."""
    outcomes: dict[str, Tries] = {}
    for task, success in attempts:
        before = outcomes.get(task, Tries(0, 0))
        outcomes[task] = Tries(before.succeeded + success, before.tried + 1)
    return outcomes


def pass_at_k(outcomes: Outcomes, k: int) -> float | None:
    """The chance that one of k tries succeeds, without bias; None if no task was tried so often."""
    chances = [1 - comb(tries.tried - tries.succeeded, k) / comb(tries.tried, k) for tries in _often(outcomes, k)]
    return fsum(chances) / len(chances) if chances else None


def pass_hat_k(outcomes: Outcomes, k: int) -> float | None:
    """The chance that all of k tries succeed (pass^k), without bias; None if no task was tried so often."""
    chances = [comb(tries.succeeded, k) / comb(tries.tried, k) for tries in _often(outcomes, k)]
    return fsum(chances) / len(chances) if chances else None


def _often(outcomes: Outcomes, k: int) -> list[Tries]:
    return [tries for tries in outcomes.values() if tries.tried >= k]


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over tasks: what resampling the tasks gives, the same each time."""
    draw = Random(0)  # noqa: S311 - not security-relevant
    means = sorted(fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def sign_test(better: int, worse: int) -> float:
    """The two-sided p-value: how often a fair coin is at least as uneven over the tasks that changed."""
    changed = better + worse
    tail = sum(comb(changed, count) for count in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << changed))


@dataclass(frozen=True, slots=True)
class OutcomeComparison:
    """Two evaluations, task by task."""

    first: Outcomes
    second: Outcomes
    other: frozenset[str] = frozenset()
    """Ids under which the two asked something else."""

    @property
    def common(self) -> list[str]:
        """The tasks that both tried."""
        return [task for task in self.first if task in self.second and task not in self.other]

    @property
    def differences(self) -> dict[str, float]:
        """By how much the second succeeds more often."""
        return {task: self.second[task].rate - self.first[task].rate for task in self.common}

    @property
    def changed(self) -> list[str]:
        """The tasks that came out otherwise, those that got worse first."""
        differences = self.differences
        return sorted((task for task in differences if differences[task]), key=lambda task: (differences[task], task))

    @property
    def summary(self) -> dict[str, Any]:
        """As a JSON value."""
        differences = self.differences
        better = sum(value > 0 for value in differences.values())
        worse = sum(value < 0 for value in differences.values())
        first, second = (fsum(side[task].rate for task in differences) for side in (self.first, self.second))
        # One task says nothing about others.
        interval = bootstrap(list(differences.values())) if len(differences) > 1 else None
        return {
            "tasks": len(differences),
            "first": round(first / len(differences), 4),
            "second": round(second / len(differences), 4),
            "difference": round((second - first) / len(differences), 4),
            "interval": interval and [round(bound, 4) for bound in interval],
            "better": better,
            "worse": worse,
            "p_value": float(f"{sign_test(better, worse):.3g}"),
            "only_first": len(self.first.keys() - self.second.keys()),
            "only_second": len(self.second.keys() - self.first.keys()),
        }

    def to_dict(self) -> dict[str, Any]:
        """The summary, with every task that changed."""
        sides = self.first, self.second
        changed = {task: [[side[task].succeeded, side[task].tried] for side in sides] for task in self.changed}
        return self.summary | {"changed": changed}


def format_interval(interval: Sequence[float] | None) -> str:
    """The bounds of a difference; `-` if there is no interval."""
    return "-" if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"

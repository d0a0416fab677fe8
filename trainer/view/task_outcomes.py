"""Outcomes by task: pass@k and pass^k, intervals by bootstrap over tasks, and the comparison of two evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb, fsum
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.errors import ConfigError
from gateway.plural import format_count
from trainer.reward.settings import RewardSettings
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts
from trainer.storage.run_files import find_run_folder, read_run_info, require_run

RESAMPLES = 2000
"""Bootstrap samples of tasks."""
EVALUATION_FOLDER = "eval"
COMPARED = ("sampled", "greedy")
"""The evaluations of a run after training, which two runs are compared by."""
MOST_ROWS = 20
"""Tasks that a table lists; `--json` lists all."""


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
Questions = Mapping[str, set[str]]
"""What the tries of each task were asked, by its id."""


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


def compare_runs(first: Path, second: Path) -> dict[str, OutcomeComparison]:
    """Compares the evaluations that two folders have: runs, or folders with scored rollouts."""
    for folder in (first, second):
        require_run(folder)
    sides = [dict(_find_evaluations(folder)) for folder in (first, second)]
    names = [name for name in sides[0] if name in sides[1]]
    if not names:
        remedy = f"name evaluations on both sides, such as {first / EVALUATION_FOLDER / COMPARED[0]}"
        raise ConfigError(f"has no evaluation of a kind that {first} has", file=second, remedy=remedy)
    comparisons = {}
    for name in names:
        (first_outcomes, asked), (second_outcomes, asked_later) = sides[0][name], sides[1][name]
        other = frozenset(task for task in asked if asked[task].isdisjoint(asked_later.get(task, asked[task])))
        comparisons[name] = OutcomeComparison(first_outcomes, second_outcomes, other)
    if not any(comparison.common for comparison in comparisons.values()):
        problem = f"has no task that {first} has too"
        if any(comparison.other for comparison in comparisons.values()):
            problem += ": under the same ids it asks something else"
        raise ConfigError(problem, file=second, remedy="evaluate both on the same tasks")
    return {name: comparison for name, comparison in comparisons.items() if comparison.common}


def _find_evaluations(folder: Path) -> Iterator[tuple[str, tuple[Outcomes, Questions]]]:
    folders = {name: folder / EVALUATION_FOLDER / name for name in COMPARED}
    found = {name: inner for name, inner in folders.items() if (inner / ROLLOUTS_FILE).exists()}
    if not found:
        is_training = find_run_folder(folder) == folder and "algorithm" in (read_run_info(folder).get("settings") or {})
        if is_training or not (folder / ROLLOUTS_FILE).exists():
            raise ConfigError("has no evaluation", file=folder, remedy=f"make one with `mtrl-train eval {folder}`")
        found = {"": folder}
    for name, inner in found.items():
        yield name, load_outcomes(inner)


def load_outcomes(folder: Path) -> tuple[Outcomes, Questions]:
    """The outcomes of the scored rollouts in a folder, and what their tasks asked."""
    settings = read_run_info(folder).get("settings")
    given = settings.get("reward") if isinstance(settings, dict) else None
    reward = RewardSettings.model_validate(given or {})
    name = reward.success_component
    scored: list[tuple[str, bool]] = []
    questions: dict[str, set[str]] = {}
    for _, summary in Rollouts(folder).summaries():
        if name in summary.rewards:
            scored.append((summary.task, summary.rewards[name] >= reward.success_at))
            if summary.question:
                questions.setdefault(summary.task, set()).add(summary.question)
    if not scored:
        problem = f"no rollout has a score of {name!r}, which decides success"
        raise ConfigError(problem, file=folder, remedy="name an evaluation, of `mtrl-train eval`")
    return count_tries(scored), questions


def format_interval(interval: Sequence[float] | None) -> str:
    """The bounds of a difference; `-` if there is no interval."""
    return "-" if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"


def print_comparison(name: str, comparison: OutcomeComparison, console: Console) -> None:
    """Prints what came of all tasks, and those that changed."""
    found, changed, sides = comparison.summary, comparison.changed, (comparison.first, comparison.second)
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    show(
        f"{name + ': ' * bool(name)}{found['first']:.3f} to {found['second']:.3f} on {found['tasks']} tasks,"
        f" {found['difference']:+.3f} {format_interval(found['interval'])};"
        f" {found['better']} better, {found['worse']} worse, p = {found['p_value']:.3g} (sign test)"
    )
    if comparison.other:
        count = format_count(len(comparison.other), "task")
        show(f"left out, since the two ask something else under the same id: {count}")
    if changed:
        table = Table("task", "first", "second")
        for task in changed[:MOST_ROWS]:
            table.add_row(escape(task), *(f"{side[task].succeeded}/{side[task].tried}" for side in sides))
        console.print(table)
    if len(changed) > MOST_ROWS:
        show(f"{len(changed) - MOST_ROWS} more tasks changed: --json lists all")
    for side in ("first", "second"):
        if count := found[f"only_{side}"]:
            show(f"{format_count(count, 'task')} of the {side} alone: not counted")


def to_json(comparisons: Mapping[str, OutcomeComparison]) -> str:
    """All comparisons as one JSON object, by the name of the evaluation."""
    return json.dumps({name or "rollouts": comparison.to_dict() for name, comparison in comparisons.items()})

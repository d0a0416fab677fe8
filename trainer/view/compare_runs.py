"""Compares the evaluations of two runs task by task, and prints what changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.errors import ConfigError
from gateway.plural import format_count
from trainer.reward.settings import RewardSettings
from trainer.storage.rollout_file import ROLLOUTS_FILE, Rollouts
from trainer.storage.run_files import find_run_folder, read_run_info, require_run
from trainer.view.task_outcomes import (
    COMPARED,
    EVALUATION_FOLDER,
    OutcomeComparison,
    Outcomes,
    count_tries,
    format_interval,
)

MOST_ROWS = 20
"""Tasks that a table lists; `--json` lists all."""
Questions = Mapping[str, set[str]]
"""What the tries of each task were asked, by its id."""


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

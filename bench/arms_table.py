"""Tables of `bench/arms.py`, without its imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

Run = Mapping[str, Any]
"""What came out of an arm with a seed."""
Record = dict[str, Any]
"""The contents of a results file: `about`, `runs`, and what a study found before its first run."""
TRIES, REACH = 40, (0.2, 0.8)
"""Tries of each task, and the success at which a task is kept."""
AFTER_TRIES = 8
"""Tries of each kept task before and after training; those that chose the tasks don't count."""
SHOWN_STEPS = 5
CEILING = 0.95
EVAL_TASKS = 100
"""Held-out tasks of one greedy evaluation."""


def group_by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, by seed."""
    arms: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        arms.setdefault(run["arm"], []).append(run)
    return arms


def kept_tasks(record: Record) -> set[str]:
    """The tasks within the first model's reach."""
    low, high = REACH
    return {task for task, rate in record["tasks"].items() if low <= rate <= high}


def steps_to(success: Sequence[float], wanted: float) -> int | None:
    """The first step at which the mean success of the last few steps is as wanted."""
    ends = range(SHOWN_STEPS, len(success) + 1)
    return next((end for end in ends if mean(success[end - SHOWN_STEPS : end]) >= wanted), None)


def format_algorithms(record: Record) -> Iterator[str]:
    """A row for each algorithm: means over its seeds."""
    first, (low, high) = record["runs"][0], REACH
    kept, tried = len(kept_tasks(record)), len(record["tasks"])
    yield f"{kept} of {tried} tasks are kept: the first model solves them in {low:.0%} to {high:.0%} of {TRIES} tries."
    yield f"Each run makes {len(first['success'])} steps with {first['rollouts']:,.0f} rollouts in all."
    yield f"Success is of {AFTER_TRIES} sampled tries of each kept task; in brackets, of the worst and the best seed."
    heads = (
        "algorithm", "seeds", "before", "after", f"seeds that reach {CEILING}", f"steps to {CEILING} in training",
        "clipped", "mismatch KL, at most", "tokens", "core-s",
    )  # fmt: skip
    yield from ("", f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|")
    yield from (_format_algorithm(title, runs) for title, runs in group_by_arm(record["runs"]).items())


def _format_algorithm(title: str, runs: Sequence[Run]) -> str:
    after = [run["after"] for run in runs]
    steps = [steps_to(run["success"], CEILING) for run in runs]
    cells = (
        title,
        str(len(runs)),
        f"{mean(run['before'] for run in runs):.3f}",
        f"{mean(after):.3f} [{min(after):.3f}, {max(after):.3f}]",
        str(sum(value >= CEILING for value in after)),
        ", ".join("never" if step is None else str(step) for step in steps),
        f"{mean(run['clipped'] for run in runs):.1%}",
        f"{max(run['mismatch_kl'] for run in runs):.0e}",
        f"{mean(run['tokens'] for run in runs):,.0f}",
        f"{mean(run['core_s'] for run in runs):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def format_ablations(record: Record) -> Iterator[str]:
    """A row for each run."""
    steps = list(record["runs"][0]["sampled"])
    yield f"| | seed | {' | '.join(f'step {step}' for step in steps)} | entropy at the end |"
    yield "|---|--:|" + "--:|" * (len(steps) + 1)
    for title, runs in group_by_arm(record["runs"]).items():
        for run in runs:
            cells = " | ".join(f"{run['sampled'][step]:.2f} / {run['greedy'][step]:.2f}" for step in steps)
            yield f"| {title} | {run['seed']} | {cells} | {run['entropy']:.3f} |"
    yield ""
    success = f"sampled over the rollouts of the last {SHOWN_STEPS} steps / greedy on {EVAL_TASKS} held-out tasks"
    yield f"Success: {success}. Entropy is of the trained tokens, those of tools included where they are trained."


def format_habit(record: Record) -> Iterator[str]:
    """A row for each run."""
    yield from ("| model | seed | sampled | greedy |", "|---|--:|--:|--:|")
    for title, runs in group_by_arm(record["runs"]).items():
        yield from (f"| {title} | {run['seed']} | {run['sampled']:.3f} | {run['greedy']:.3f} |" for run in runs)

"""Evaluation: success rates on held-out tasks, during a run and as a comparison of the model before and after."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import sqrt
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from rich.console import Console
from rich.table import Table

from gateway.errors import ConfigError
from trainer.engine.base import CountsTokens, Engine
from trainer.policy.policy import Policy
from trainer.reward.scorer import ScoredGroup, Scorer
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.scheduler import Group, Scheduler
from trainer.rollout.settings import ConcurrencySettings
from trainer.rollout.task import Task
from trainer.setup import trust_model
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_files import RUN_INFO_FILE, write_json
from trainer.storage.run_status import StatusFile, read_status
from trainer.train.checkpoint import Checkpoint, Checkpoints
from trainer.train.job import Job, JobObjects, open_job, require_tasks
from trainer.train.run_folder import load_run_settings, use_start_model
from trainer.train.settings import EvaluationSettings, TrainSettings
from trainer.view.progress import RolloutProgress
from trainer.view.task_outcomes import (
    COMPARED,
    EVALUATION_FOLDER,
    OutcomeComparison,
    Outcomes,
    bootstrap,
    count_tries,
    format_interval,
    pass_at_k,
    pass_hat_k,
)

GROUP_PREFIX = "e-"
"""Prefix of group names, so that evaluation rollouts are distinct from those of steps."""
Z_95 = 1.96
"""The standard normal quantile of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class SuccessRate:
    """Successes out of attempts."""

    succeeded: int
    tried: int
    rates: tuple[float, ...] = ()
    """By task, if tasks were tried several times: tries of one task are alike, so tasks are resampled."""

    @property
    def value(self) -> float:
        return self.succeeded / self.tried if self.tried else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which stays within 0 and 1, and is informative for 0 out of 50 too. With several
        tries a task, that of a bootstrap over tasks."""
        if not self.tried:
            return 0.0, 1.0
        if len(set(self.rates)) > 1:
            return bootstrap(self.rates)
        square, tried = Z_95**2, len(self.rates) or self.tried
        middle = (self.value + square / (2 * tried)) / (1 + square / tried)
        half = Z_95 / (1 + square / tried) * sqrt(self.value * (1 - self.value) / tried + square / (4 * tried**2))
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success rates over all tasks and by kind of task."""

    all: SuccessRate
    kinds: Mapping[str, SuccessRate]
    lost: int
    """Rollouts that could not be scored; they are not counted in the rates."""
    groups: tuple[ScoredGroup, ...] = ()

    @classmethod
    def from_groups(cls, groups: Sequence[ScoredGroup], lost: int) -> Evaluation:
        kinds: dict[str, list[ScoredGroup]] = {}
        for group in groups:
            kinds.setdefault(group.task.kind, []).append(group)
        rates = {kind: _measure_success(kinds[kind]) for kind in sorted(kinds)}
        return cls(_measure_success(groups), rates, lost, tuple(groups))

    @property
    def outcomes(self) -> Outcomes:
        """The scored tries by task."""
        return count_tries((group.task.id, scored.success) for group in self.groups for scored in group.scored)

    def passes(self, k: int) -> dict[str, dict[int, float]]:
        """pass@k and pass^k for k and the powers of two below it; empty for a single try."""
        counts = [2**power for power in range(1, k.bit_length()) if 2**power < k] + [k] * (k > 1)
        outcomes = self.outcomes
        return {
            name: found
            for name, compute in (("pass@", pass_at_k), ("pass^", pass_hat_k))
            if (found := {count: value for count in counts if (value := compute(outcomes, count)) is not None})
        }

    def tries_metrics(self, k: int) -> dict[str, float]:
        """The metrics of k sampled tries of each task; pass@k and pass^k only if some task has so many."""
        metrics = {"eval/lost_tries": float(self.lost)}
        if self.all.tried:
            metrics["eval/sampled"] = self.all.value
        return metrics | {f"eval/{name}k": each[k] for name, each in self.passes(k).items() if k in each}

    def metrics_by_kind(self, name: str) -> dict[str, float]:
        """A metric for each kind, if there is more than one."""
        return {f"{name}/{kind}": rate.value for kind, rate in self.kinds.items()} if len(self.kinds) > 1 else {}

    def kind_shares(self, name: str) -> dict[str, float]:
        """The share of each kind in the scored rollouts, if there is more than one."""
        if len(self.kinds) < 2 or not self.all.tried:
            return {}
        return {f"{name}/{kind}": rate.tried / self.all.tried for kind, rate in self.kinds.items()}


def _measure_success(groups: Sequence[ScoredGroup]) -> SuccessRate:
    counts = [(sum(scored.success for scored in group.scored), len(group.scored)) for group in groups]
    rates = tuple(succeeded / tried for succeeded, tried in counts if tried)
    is_repeated = any(tried > 1 for _, tried in counts)
    succeeded, tried = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return SuccessRate(succeeded, tried, rates if is_repeated else ())


async def evaluate(
    runner: RolloutRunner, scorer: Scorer, tasks: Sequence[Task], concurrency: ConcurrencySettings, tries: int = 1
) -> Evaluation:
    """Runs each task, by default once."""
    scored: dict[int, ScoredGroup] = {}

    async def score(group: Group) -> None:
        index = int(group.rollouts[0].group.removeprefix(GROUP_PREFIX))
        scored[index] = await scorer.score(group.task, group.rollouts)

    scheduler = Scheduler(runner, tries, admission=Admission(concurrency))
    async with scheduler.submit(tasks, name=GROUP_PREFIX) as groups, anyio.create_task_group() as scoring:
        async for group in groups:
            if group.rollouts:
                scoring.start_soon(score, group)
    ordered = [scored[index] for index in sorted(scored)]
    return Evaluation.from_groups(ordered, tries * len(tasks) - sum(len(group.scored) for group in ordered))


COMPARISON_FILE = "comparison.json"
EVALUATING = "evaluating"
SILENT_S = 5.0
"""The age of a status from which nothing writes it any more: a run that trains does so every second."""
VARIANTS = ("sampled_before", "greedy_before", "sampled", "greedy")
"""The compared evaluations, in the order in which they are made."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Success before and after training, sampled and greedy; or of a model alone."""

    variants: Mapping[str, Evaluation]
    step: int | None
    """Of the checkpoint; None for a model alone, whose evaluations are `sampled` and `greedy`."""
    tasks: int
    is_held_out: bool
    """Whether the run did not train on these tasks."""
    tries: int = 1
    """Of each task, when sampled."""
    changes: Sequence[str] = ()
    """Settings that differ from the run's, as they were written."""

    @property
    def paired(self) -> dict[str, OutcomeComparison]:
        """Before and after training, task by task."""
        before = {name: found for name in COMPARED if (found := self.variants.get(f"{name}_before"))}
        pairs = {name: (found.outcomes, self.variants[name].outcomes) for name, found in before.items()}
        compared = {name: OutcomeComparison(*pair) for name, pair in pairs.items()}
        return {name: comparison for name, comparison in compared.items() if comparison.common}

    @property
    def passes(self) -> dict[str, dict[str, dict[int, float]]]:
        """pass@k and pass^k of the sampled evaluations."""
        names = (name for name in self.variants if name.startswith("sampled"))
        return {name: found for name in names if (found := self.variants[name].passes(self.tries))}

    @property
    def summary(self) -> dict[str, Any]:
        """As a JSON value."""
        rates = {name: round(evaluation.all.value, 4) for name, evaluation in self.variants.items()}
        by_kind = {
            kind: {
                name: round(evaluation.kinds[kind].value, 4)
                for name, evaluation in self.variants.items()
                if kind in evaluation.kinds
            }
            for kind in self._kinds
        }
        intervals = {
            name: [round(bound, 4) for bound in evaluation.all.interval] for name, evaluation in self.variants.items()
        }
        return rates | {
            "by_kind": by_kind,
            "intervals": intervals,
            "paired": {name: comparison.summary for name, comparison in self.paired.items()},
            "passes": {
                name: {
                    f"{what}{count}": round(value, 4) for what, each in found.items() for count, value in each.items()
                }
                for name, found in self.passes.items()
            },
            "tasks": self.tasks,
            "lost": sum(evaluation.lost for evaluation in self.variants.values()),
            "held_out": self.is_held_out,
            "step": self.step,
            "changes": list(self.changes),
        }

    @property
    def table(self) -> Table:
        tasks = f"{self.tasks} held-out tasks" if self.is_held_out else f"{self.tasks} of the training tasks"
        when = "" if self.step is None else f", before and after {self.step} steps"
        table = Table(title=f"success on {tasks}{when}, with 95 % intervals")
        table.add_column("")
        for name in self.variants:
            after = "" if self.step is None or "before" in name else " after"
            table.add_column(f"{name.replace('_', ' ')}{after}", justify="right")
        table.add_row("all", *(_format_rate(found.all) for found in self.variants.values()), style="bold")
        passes = self.passes
        for what, tries in ((what, tries) for what, each in passes.get("sampled", {}).items() for tries in each):
            cells = (passes.get(name, {}).get(what, {}).get(tries) for name in self.variants)
            table.add_row(f"{what}{tries}", *("-" if value is None else f"{value:.3f}" for value in cells))
        for kind in self._kinds if len(self._kinds) > 1 else ():
            rates = (found.kinds.get(kind, SuccessRate(0, 0)) for found in self.variants.values())
            table.add_row(kind, *map(_format_rate, rates))
        if self.changes:
            table.title = f"{table.title}, with {' '.join(self.changes)}"
        captions = []
        for name, comparison in self.paired.items():
            found = comparison.summary
            captions.append(
                f"{name}: {found['difference']:+.3f} {format_interval(found['interval'])} task by task,"
                f" {found['better']} better, {found['worse']} worse, p = {found['p_value']:.3g}"
            )
        if lost := sum(evaluation.lost for evaluation in self.variants.values()):
            captions.append(f"{lost} rollouts could not be scored and are not counted")
        table.caption = "\n".join(captions) or None
        return table

    @property
    def _kinds(self) -> list[str]:
        return sorted({kind for evaluation in self.variants.values() for kind in evaluation.kinds})


def _format_rate(rate: SuccessRate) -> str:
    low, high = rate.interval
    return f"{rate.value:.3f} [{low:.2f}, {high:.2f}]" if rate.tried else "-"


async def compare_run(
    run: Path,
    rows: int | None,
    data: str | None,
    console: Console,
    objects: JobObjects | None = None,
    changed: tuple[TrainSettings, Sequence[str]] | None = None,
) -> Comparison:
    """Compares the model before training with a run's latest intact checkpoint.

    `changed` are the run's settings with changes, and the words that made them.
    """
    given, words = changed or (load_run_settings(run), ())
    settings = _for_evaluation(use_start_model(run, given), rows, data)
    checkpoint = Checkpoints(run).find_latest(lambda text: console.print(text, markup=False, soft_wrap=True))
    if checkpoint is None:
        raise ConfigError("the run has no checkpoint yet", file=run, remedy="continue the run with --resume")
    trust_model(settings, run)
    async with open_job(settings, objects=objects) as job:
        policy = await to_thread.run_sync(Policy.load, job.model, settings.update)
        async with _open_engine(job, policy, run, console) as engine:
            if engine.version:
                await engine.publish(policy.weights, 0)
            with _show_progress(job, engine, run, console, VARIANTS) as progress:
                comparison = await compare_policies(job, engine, policy, checkpoint, run, progress)
    return _save_comparison(replace(comparison, changes=words), run)


async def evaluate_model(
    given: TrainSettings, rows: int | None, data: str | None, console: Console, out: Path
) -> Comparison:
    """Evaluates a run file's model as it is, sampled and greedy, and saves the rollouts in `out`."""
    settings = _for_evaluation(given, rows, data)
    trust_model(settings, Path(settings.model))
    async with open_job(settings) as job, _open_engine(job, None, out, console) as engine:
        tasks = job.held_out(settings.evaluation.final_rows)
        with _show_progress(job, engine, out, console, COMPARED) as progress:
            variants = {name: await _evaluate_variant(job, engine, tasks, progress, name, out) for name in COMPARED}
    comparison = Comparison(variants, None, len(tasks), job.tasks.is_held_out, settings.evaluation.k)
    return _save_comparison(comparison, out)


def _for_evaluation(settings: TrainSettings, rows: int | None, data: str | None) -> TrainSettings:
    overrides = {name: value for name, value in (("final_rows", rows), ("data", data)) if value is not None}
    evaluation = EvaluationSettings.model_validate(settings.evaluation.model_dump() | overrides)
    evaluated = settings.model_copy(update={"evaluation": evaluation, "record": False})
    require_tasks(evaluated)
    return evaluated


@asynccontextmanager
async def _open_engine(job: Job, policy: Policy | None, out: Path, console: Console) -> AsyncIterator[Engine]:
    """The engine, with players that use it; the evaluation's own settings are saved, by which it is judged later."""
    folder, log = out / EVALUATION_FOLDER, partial(console.print, markup=False)
    _keep_earlier(folder)  # Not before the job is open: a mistake in its settings leaves the earlier one where it is.
    async with job.make_engine(folder, policy, log) as engine, job.open_player(engine, folder, log):
        about = {"model": str(job.model), "settings": job.settings.model_dump(mode="json")}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN_INFO_FILE, about, _again(out))
        yield engine


def _save_comparison(comparison: Comparison, out: Path) -> Comparison:
    write_json(out / EVALUATION_FOLDER / COMPARISON_FILE, comparison.summary, _again(out))
    return comparison


def _again(out: Path) -> str:
    return f"then evaluate again: `mtrl-train eval` of {out}"


def _keep_earlier(folder: Path) -> None:
    """Gives the folder of a complete evaluation another name (`eval-1`), so that the next one does not replace it."""
    if (folder / COMPARISON_FILE).exists():
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
        folder.rename(next(name for name in names if not name.exists()))


@contextmanager
def _show_progress(
    job: Job, engine: Engine, out: Path, console: Console, names: Sequence[str]
) -> Iterator[RolloutProgress]:
    """Shows the progress of evaluations, and keeps it in the run's folder for the web UI.

    A run that is still training, or was killed a moment ago, keeps its own status there.
    """
    tasks, tries = len(job.held_out(job.settings.evaluation.final_rows)), job.settings.evaluation.k
    progress = RolloutProgress(len(names) // 2 * (1 + tries) * tasks, phase=EVALUATING, console=console)
    if isinstance(engine, CountsTokens):
        progress.read_sampled = partial(getattr, engine, "sampled_tokens")
    found = read_status(out)
    is_training = found is not None and found[1] < SILENT_S
    with nullcontext() if is_training else StatusFile(out, progress.status), progress:
        yield progress


async def compare_policies(
    job: Job, engine: Engine, policy: Policy, checkpoint: Checkpoint, run: Path, progress: RolloutProgress
) -> Comparison:
    """Evaluates the weights that the engine has, then publishes the checkpoint's and evaluates those.

    The policy takes the checkpoint's weights only then, since an embedded engine may share its tensors.
    """
    tasks = job.held_out(job.settings.evaluation.final_rows)
    variants: dict[str, Evaluation] = {}
    for name in VARIANTS:
        if name == "sampled":
            await to_thread.run_sync(policy.resume, checkpoint.folder)
            await engine.publish(policy.weights, checkpoint.step)
        variants[name] = await _evaluate_variant(job, engine, tasks, progress, name, run)
    return Comparison(variants, checkpoint.step, len(tasks), job.tasks.is_held_out, job.settings.evaluation.k)


async def _evaluate_variant(
    job: Job, engine: Engine, tasks: Sequence[Task], progress: RolloutProgress, name: str, out: Path
) -> Evaluation:
    progress.begin_phase(f"{EVALUATING} {name.replace('_', ' ')}")
    greedy = name.startswith("greedy")
    runner = job.make_runner(engine, progress)
    runner = job.make_greedy(runner) if greedy else runner
    tries = 1 if greedy else job.settings.evaluation.k
    found = await evaluate(runner, job.scorer, tasks, job.settings.concurrency, tries)
    progress.console.print(f"{name.replace('_', ' ')}: {_format_rate(found.all)}", markup=False)
    await to_thread.run_sync(save_rollouts, out / EVALUATION_FOLDER / name, found)
    return found


def save_rollouts(folder: Path, evaluation: Evaluation) -> None:
    """Replaces the rollouts of an evaluation that was not completed; `mtrl-train show` reads them."""
    shutil.rmtree(folder, ignore_errors=True)
    with RolloutWriter(folder) as writer:
        for group in evaluation.groups:
            for scored in group.scored:
                writer.add(scored.rollout)

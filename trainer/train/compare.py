"""What a run has learned: the model as it was beside the model as it is, on the same tasks, two ways of writing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio import to_thread
from rich.console import Console
from rich.table import Table

from gateway.errors import ConfigError
from trainer.engine.base import Engine
from trainer.play import Unwatched
from trainer.policy.policy import Policy
from trainer.run.file import Writer
from trainer.task import Task
from trainer.train.checkpoint import Checkpoints
from trainer.train.evaluate import Evaluation, Rate, evaluate
from trainer.train.folder import settings_of
from trainer.train.job import Job, opened
from trainer.train.settings import EvaluationSettings

FOLDER = "eval"
FOUND = "comparison.json"
WAYS = ("sampled_before", "greedy_before", "sampled", "greedy")
"""In the order in which they are made."""


@dataclass(frozen=True, slots=True)
class Comparison:
    ways: Mapping[str, Evaluation]
    step: int
    tasks: int
    apart: bool
    """Whether these tasks were not trained on."""

    @property
    def json(self) -> str:
        told = {way: round(seen.all.value, 4) for way, seen in self.ways.items()}
        kinds = {
            kind: {way: round(seen.kinds[kind].value, 4) for way, seen in self.ways.items() if kind in seen.kinds}
            for kind in self._kinds
        }
        return json.dumps(
            told
            | {
                "by_kind": kinds,
                "intervals": {way: [round(end, 4) for end in seen.all.interval] for way, seen in self.ways.items()},
                "tasks": self.tasks,
                "lost": sum(seen.lost for seen in self.ways.values()),
                "held_out": self.apart,
                "step": self.step,
            }
        )

    @property
    def table(self) -> Table:
        where = "held-out tasks" if self.apart else "of the tasks that it trained on"
        table = Table(title=f"success on {self.tasks} {where}, before and after {self.step} steps, with 95 % intervals")
        table.add_column("")
        for way in WAYS:
            table.add_column(way.replace("_", " ") if "before" in way else f"{way} after", justify="right")
        table.add_row("all", *(_told(self.ways[way].all) for way in WAYS), style="bold")
        for kind in self._kinds if len(self._kinds) > 1 else ():
            table.add_row(kind, *(_told(self.ways[way].kinds.get(kind, Rate(0, 0))) for way in WAYS))
        if lost := sum(seen.lost for seen in self.ways.values()):
            table.caption = f"{lost} rollouts could not be scored, and count neither way"
        return table

    @property
    def _kinds(self) -> list[str]:
        return sorted({kind for seen in self.ways.values() for kind in seen.kinds})


def _told(rate: Rate) -> str:
    low, high = rate.interval
    return f"{rate.value:.3f} [{low:.2f}, {high:.2f}]" if rate.tried else "-"


async def compare(run: Path, rows: int | None, data: str | None, console: Console) -> Comparison:
    """Of a run's folder, whatever process made it. Its latest whole checkpoint is the model as it is."""
    settings = settings_of(run)
    chosen = {name: value for name, value in (("rows", rows), ("data", data)) if value is not None}
    evaluation = EvaluationSettings.model_validate(settings.evaluation.model_dump() | chosen)
    found = Checkpoints(run).latest(lambda said: console.print(said, markup=False, soft_wrap=True))
    if found is None:
        raise ConfigError("has no checkpoint yet", file=run, remedy="go on with the run by --resume")
    async with opened(settings.model_copy(update={"evaluation": evaluation, "record": False})) as job:
        policy = await to_thread.run_sync(Policy.load, job.model, settings.update)
        told = partial(console.print, markup=False)
        async with job.engine(run / FOLDER, policy, told) as engine:
            if engine.version:
                await engine.publish(policy.weights, 0)
            await to_thread.run_sync(policy.resume, found.folder)
            return await compared(job, engine, policy, found.step, run, told)


async def compared(
    job: Job, engine: Engine, policy: Policy, step: int, run: Path, told: Callable[[str], None]
) -> Comparison:
    """The engine holds the weights as they were, and then those as they are."""
    tasks = job.held_out(job.settings.evaluation.rows)
    ways: dict[str, Evaluation] = {}
    for way in WAYS:
        if way == "sampled":
            await engine.publish(policy.weights, step)
        ways[way] = await _seen(job, engine, tasks, greedy=way.startswith("greedy"))
        told(f"{way.replace('_', ' ')}: {_told(ways[way].all)}")
        await to_thread.run_sync(_keep, run / FOLDER / way, ways[way])
    comparison = Comparison(ways, step, len(tasks), job.tasks.apart)
    (run / FOLDER / FOUND).write_text(comparison.json + "\n", encoding="utf-8")
    return comparison


async def _seen(job: Job, engine: Engine, tasks: Sequence[Task], *, greedy: bool) -> Evaluation:
    player = job.player(engine, Unwatched())
    player = job.greedy(player) if greedy else player
    return await evaluate(player, job.scorer, tasks, job.settings.admission, job.settings.evaluation.kind)


def _keep(folder: Path, seen: Evaluation) -> None:
    """To be read by `show`, instead of those of an earlier evaluation."""
    shutil.rmtree(folder, ignore_errors=True)
    with Writer(folder) as writer:
        for group in seen.groups:
            for one in group.scored:
                writer.add(one.rollout)

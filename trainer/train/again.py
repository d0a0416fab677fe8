"""A recorded step is made again: the tape stands for the tools, the ledgers for the engine, and the loss must agree."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from gateway.tape import Replay
from trainer.engine.scripted import ScriptedEngine
from trainer.learn.lesson import lesson, teaches
from trainer.play import Unwatched
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.replay import attempts, differs, says
from trainer.reward.scored import ScoredGroup
from trainer.run.file import Rollouts
from trainer.run.rollout import Rollout
from trainer.task import Task
from trainer.train.folder import METRICS, Folder
from trainer.train.job import Job, opened
from trainer.train.rolling import place
from trainer.train.settings import TrainSettings

SAME = ("loss", "reward/mean", "update/grad_norm")
"""Of a step's metrics, those that its rollouts and weights decide."""


async def again(run: Path, step: int, console: Console) -> bool:
    """True where ids, masks, rewards and loss are those that were recorded."""
    folder = Folder(run)
    settings = folder.settings()
    recorded, told = _step(run, step), _metrics(run, step)
    tape = folder.tape_of(step)
    if tape is None:
        raise ConfigError("has no tape", file=run, remedy="make the run with `record: true`")
    async with opened(settings, gateway=Replay(tape)) as job:
        tasks = _tasks(job, recorded)
        different = 0
        for before, attempt in attempts(recorded):
            after = await _played(job, before, tasks[before.task], attempt)
            if problem := differs(before, after):
                different += 1
                console.print(f"{before.task} {before.group}/{before.index}: {problem}", markup=False, soft_wrap=True)
        console.print(f"{len(recorded)} rollouts of step {step} played again, {different} of them differ")
        learned = await to_thread.run_sync(_learned, job, folder, step, console)
    apart = [name for name in SAME if name in told and learned.get(name, told[name]) != told[name]]
    for name in apart:
        console.print(f"{name} was {told[name]!r}, and is {learned.get(name)!r}", markup=False)
    if "loss" in told and not apart:
        console.print(f"the loss is {learned['loss']!r}, as it was", markup=False)
    return not different and not apart


async def _played(job: Job, before: Rollout, task: Task, attempt: int) -> Rollout:
    engine = ScriptedEngine(says(before))
    async with engine:
        player = job.player(engine, Unwatched())
        after = await player.play(task, group=before.group, index=before.index, attempt=attempt)
    group = await job.scorer.score(task, [after])
    return group.scored[0].rollout if group.scored else after


def _step(run: Path, step: int) -> list[Rollout]:
    found = [rollout for rollout in Rollouts(run) if place(rollout.group)[0] == step]
    if not found:
        raise ConfigError(f"has no rollouts of step {step}", file=run, remedy="name a step that was made, from 1")
    return found


def _metrics(run: Path, step: int) -> dict[str, Any]:
    for line in (run / METRICS).read_text(encoding="utf-8").splitlines():
        told: dict[str, Any] = json.loads(line)
        if told.get("step") == step:
            return told
    raise ConfigError(f"has no metrics of step {step}", file=run, remedy="name a step that was finished")


def _tasks(job: Job, rollouts: Iterable[Rollout]) -> dict[str, Task]:
    """As the curriculum asked for them; ids are unique within a source."""
    wanted = {rollout.task for rollout in rollouts}
    found: dict[str, Task] = {}
    for stage in job.settings.curriculum.stages:
        for task in job.tasks.train[stage.data]:
            if task.id in wanted:
                found.setdefault(task.id, stage.of(task))
    if missing := wanted - found.keys():
        remedy = "replay it beside the data that it was made from"
        raise ConfigError(f"the task {min(missing)!r} is no longer there", file=job.settings.data, remedy=remedy)
    return found


def _learned(job: Job, folder: Folder, step: int, console: Console) -> dict[str, float]:
    """From the last weights that are kept before the step, all that was learned until it is learned again."""
    policy = Policy.load(job.model, job.settings.update)
    kept = folder.checkpoints.before(step)
    if kept:
        policy.resume(kept.folder)
    learner = Learner(policy, job.settings.algorithm, exact=True, temperature=job.settings.sampling.temperature)
    steps: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in Rollouts(folder.path):
        steps[place(rollout.group)[0]].append(rollout)
    wanted = [rollout for number, each in steps.items() if number <= step for rollout in each]
    tasks = _tasks(job, wanted)
    learned: dict[str, float] = {}
    first = kept.step + 1 if kept else 1
    console.print(f"learning steps {first} to {step} again", markup=False)
    for number in range(first, step + 1):
        groups = _groups(job, steps[number], tasks)
        learned = learner.learn(lesson(groups, job.settings.algorithm, job.rounds)) if groups else {}
    return learned


def _groups(job: Job, rollouts: Sequence[Rollout], tasks: Mapping[str, Task]) -> list[ScoredGroup]:
    """As they were scored; what was not, and what taught nothing and was replaced, is left out again."""
    settings = job.settings
    named: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.stop.infrastructure:
            named[rollout.group].append(rollout)
    if settings.groups.on_failure == "drop":
        named = {name: one for name, one in named.items() if len(one) == settings.n}
    scored = [job.scorer.recalled(tasks[named[name][0].task], named[name]) for name in sorted(named, key=place)]
    groups = [group for group in scored if group.scored]
    if not settings.algorithm.dynamic:
        return groups
    return [group for group in groups if _last_draw(group, settings) or teaches(group, settings.algorithm)]


def _last_draw(group: ScoredGroup, settings: TrainSettings) -> bool:
    """What is drawn last is taken as it is."""
    return place(group.scored[0].rollout.group)[1] == settings.draws

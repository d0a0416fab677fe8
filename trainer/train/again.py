"""A recorded step is made again: the tape stands for the tools, the ledgers for the engine, and the loss must agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from gateway.tape import Replay
from trainer.engine.scripted import ScriptedEngine
from trainer.learn.lesson import lesson, teaches
from trainer.ledger import NOTHING
from trainer.play import Unwatched
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.replay import attempts, differs, says
from trainer.reward.scored import ScoredGroup
from trainer.run.file import Rollouts
from trainer.run.history import Measured, history
from trainer.run.rollout import Rollout
from trainer.task import Task
from trainer.train.checkpoint import Checkpoint
from trainer.train.folder import METRICS, Folder
from trainer.train.job import Job, opened
from trainer.train.rolling import place
from trainer.train.settings import TrainSettings

SAME = ("loss", "update/grad_norm")
"""Of a step's metrics, those that its rollouts and weights decide."""


async def again(run: Path, step: int, console: Console) -> bool:
    """True where ids, masks, rewards and loss are those that were recorded."""
    folder = Folder(run)
    settings, tape = folder.settings(), folder.tape_of(step)
    kept = folder.checkpoints.before(step)
    recorded = _recorded(run, kept.step + 1 if kept else 1, step)
    if tape is None:
        raise ConfigError("has no tape", file=run, remedy="make the run with `record: true`")
    if folder.model is not None:
        settings = settings.model_copy(update={"model": str(folder.model)})
    told = recorded[step].measured
    async with opened(settings, gateway=Replay(tape)) as job:
        _ask(job, recorded)
        different = await _played(job, recorded[step], lambda said: console.print(said, markup=False, soft_wrap=True))
        count = len(recorded[step].rollouts)
        console.print(f"{count} rollouts of step {step} played again, {different} of them differ")
        learned = await to_thread.run_sync(_learned, job, kept, recorded, console)
    apart = [name for name in SAME if learned.get(name) != told.get(name)]
    for name in apart:
        console.print(f"{name} was {told.get(name)!r}, and is {learned.get(name)!r}", markup=False)
    if not apart:
        same = f"the loss is {told['loss']!r}" if "loss" in told else "there is nothing to learn from"
        console.print(f"{same}, as it was", markup=False)
    return not different and not apart


@dataclass
class _Step:
    """What is known of one."""

    measured: Measured
    rollouts: Sequence[Rollout]
    tasks: Mapping[str, Task]
    """By the names of groups, as they were asked."""


def _recorded(run: Path, first: int, step: int) -> dict[int, _Step]:
    """All steps until this one, with the rollouts of those from which is learned again."""
    played: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in Rollouts(run):
        number = rollout.step or place(rollout.group)[0]
        if first <= number <= step:
            played[number].append(rollout)
    if step not in played:
        raise ConfigError(f"has no rollouts of step {step}", file=run, remedy="name a step that was made, from 1")
    measured = {int(told["step"]): told for told in history(run / METRICS)}
    if step not in measured:
        raise ConfigError(f"has no metrics of step {step}", file=run, remedy="name a step that was finished")
    return {number: _Step(told, played[number], {}) for number, told in measured.items() if 0 < number <= step}


def _ask(job: Job, recorded: Mapping[int, _Step]) -> None:
    """Finds the tasks as the curriculum had them asked, which is told by what it was told; ids are a source's own."""
    wanted = {rollout.task for step in recorded.values() for rollout in step.rollouts}
    sources = {
        name: {task.id: task for task in source if task.id in wanted} for name, source in job.tasks.train.items()
    }
    stages = [job.course.stage]  # By version: what had been told when a group began.
    for number, step in recorded.items():
        asked: dict[str, Task] = {}
        for rollouts in _named(step.rollouts).values():
            group, id, stage = rollouts[0].group, rollouts[0].task, stages[_begun(rollouts, number - 1)]
            if id not in sources[stage.data]:
                remedy = "replay it beside the data that it was made from"
                file = stage.data or job.settings.data
                raise ConfigError(f"the task {id!r} is no longer there", file=file, remedy=remedy)
            asked[group] = stage.of(sources[stage.data][id])
        step.tasks = asked
        job.course.tell(number - 1, step.measured.get("success/sampled"))
        stages.append(job.course.stage)


def _begun(rollouts: Sequence[Rollout], before: int) -> int:
    """The version that there was when a group began: in its name, or that of all it wrote."""
    own, version = place(rollouts[0].group)[:2]
    return version if not own else min((version for one in rollouts for version in one.versions), default=before)


async def _played(job: Job, step: _Step, told: Callable[[str], None]) -> int:
    """How many came otherwise. Siblings are scored together, since a function may look at all of them."""
    were = {(one.group, one.index): (one, attempt) for one, attempt in attempts(step.rollouts)}
    came: dict[tuple[str, int], Rollout] = {}
    for key, (before, attempt) in were.items():
        engine = ScriptedEngine(says(before))
        async with engine:
            player = job.player(engine, Unwatched())
            after = await player.play(step.tasks[before.group], group=key[0], index=key[1], attempt=attempt)
        came[key] = replace(after, rewards=NOTHING)  # As long as nobody has scored it.
    for siblings in _groups(came.values(), job.settings):
        group = await job.scorer.score(step.tasks[siblings[0].group], siblings)
        came |= {(one.rollout.group, one.rollout.index): one.rollout for one in group.scored}
    different = 0
    for key, (before, _) in were.items():
        if problem := differs(before, came[key]):
            different += 1
            told(f"{before.task} {before.group}/{before.index}: {problem}")
    return different


def _learned(job: Job, kept: Checkpoint | None, recorded: Mapping[int, _Step], console: Console) -> Mapping[str, float]:
    """From the last weights that are kept before the step, all that was learned until it is learned again."""
    policy = Policy.load(job.model, job.settings.update)
    if kept:
        policy.resume(kept.folder)
    first, last = kept.step + 1 if kept else 1, max(recorded)
    # An engine that is exact was believed; with any other the policy's own logprobs were asked for.
    exact = all(recorded[number].measured.get("mismatch/pass_skipped") != 0 for number in range(first, last + 1))
    learner = Learner(policy, job.settings.algorithm, exact=exact, temperature=job.settings.sampling.temperature)
    learned: Mapping[str, float] = NOTHING
    console.print(f"learning steps {first} to {last} again", markup=False)
    for number in range(first, last + 1):
        groups = list(_scored(job, recorded[number]))
        given = lesson(groups, job.settings.algorithm, job.rounds, number - 1)
        learned = learner.learn(given) if groups else NOTHING
    return learned


def _scored(job: Job, step: _Step) -> Iterator[ScoredGroup]:
    """As they were scored; what was not, and what taught nothing and was replaced, is left out again."""
    settings = job.settings
    for siblings in _groups(step.rollouts, settings):
        group = job.scorer.recalled(step.tasks[siblings[0].group], siblings)
        # What is drawn last is taken as it is, and what names its step was learned from.
        own, draw = place(siblings[0].group)[:2]
        replaceable = settings.algorithm.dynamic and own and draw < settings.draws
        if group.scored and (not replaceable or teaches(group, settings.algorithm)):
            yield group


def _named(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    named: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        named[rollout.group].append(rollout)
    return named


def _groups(rollouts: Iterable[Rollout], settings: TrainSettings) -> Iterator[list[Rollout]]:
    """Those that count, in the order in which they began."""
    named = _named(one for one in rollouts if not one.stop.infrastructure)
    for name in sorted(named, key=place):
        if settings.groups.on_failure != "drop" or len(named[name]) == settings.n:
            yield sorted(named[name], key=lambda one: one.index)

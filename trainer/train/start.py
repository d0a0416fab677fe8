"""A run begins where its folder says: at its first step, or behind the last one that is safe."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from trainer.engines import notes
from trainer.policy import chance
from trainer.policy.learner import Learner
from trainer.policy.placement import placement
from trainer.policy.policy import Policy
from trainer.run.file import Writer
from trainer.thread import OwnThread
from trainer.train import modes
from trainer.train.checkpoint import Checkpoint
from trainer.train.compare import compare
from trainer.train.folder import METRICS, Folder, differences
from trainer.train.job import Job, opened
from trainer.train.loop import Training
from trainer.train.metrics import Metrics
from trainer.train.reports import Reports, packages
from trainer.train.settings import TrainSettings
from trainer.view.training import TrainingProgress
from trainer.view.warming import warming


async def train(settings: TrainSettings, path: Path, console: Console, *, resume: bool = False) -> None:
    """Everything that can be wrong is looked at before the weights are loaded."""
    packages(settings.report)
    with Folder(path, settings.checkpoint.keep) as folder:
        found = _found(folder, settings, console) if resume else None
        if not resume and folder.begun:
            remedy = "go on with it by --resume, or name another folder with --out"
            raise ConfigError("there is a run already", file=folder.path, remedy=remedy)
        step = found.step if found else 0
        async with AsyncExitStack() as stack:
            tape = folder.tape(step + 1) if settings.record else None
            with warming(console) as shown:
                job = await stack.enter_async_context(opened(settings, tape=tape, warming=shown))
            training = await _training(job, folder, found, stack, console)
            with _loaded():
                await training.run()
        if settings.evaluation.after:
            console.print("what it has learned: the model as it was, and as it is", markup=False)
            console.print((await compare(folder.path, None, None, console)).table)


@contextmanager
def _loaded() -> Iterator[None]:
    """What is there by now stays until the end: to look through it for garbage was a twentieth of each step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _found(folder: Folder, settings: TrainSettings, console: Console) -> Checkpoint | None:
    """Where to go on; None where the run was ended before its first checkpoint."""
    changed = differences(folder.settings(), settings)
    if changed:
        remedy = "leave that out to go on with the run, or begin another without --resume"
        raise ConfigError(f"was begun with other settings: {'; '.join(changed)}", file=folder.path, remedy=remedy)
    return folder.checkpoints.latest(lambda said: console.print(said, markup=False, soft_wrap=True))


async def _training(
    job: Job, folder: Folder, found: Checkpoint | None, stack: AsyncExitStack, console: Console
) -> Training:
    settings, step = job.settings, found.step if found else 0
    placed = await to_thread.run_sync(placement, settings, job.model)
    placed.plan.require()
    policy = await to_thread.run_sync(_policy, job, found)
    told = partial(console.print, markup=False, soft_wrap=True)
    serving = placed.serving(settings.serving)
    if placed.fraction is not None:
        told(str(placed))  # Before the server starts: where it does not, that is what one wants to know.
    engine = await stack.enter_async_context(job.engine(folder.path, policy, told, serving))
    if engine.version != step:
        await engine.publish(policy.weights, step)
    told(f"rollouts are written by the {engine.capabilities.name} engine")
    if settings.mode != "synchronous":
        told(modes.told(settings))
    for note in (*notes(engine.capabilities), *job.tasks.notes):
        told(note)
    if found:
        job.course.resume(found.state["position"])
    folder.cut(found.state["rollouts"] if found else 0, step)
    metrics = stack.enter_context(Metrics(folder.path / METRICS))
    history = metrics.cut(step if found else -1)  # Without a checkpoint it begins anew, step 0 included.
    writer = stack.enter_context(Writer(folder.path))
    progress = stack.enter_context(TrainingProgress(settings.steps, console=console, history=history))
    dumped = settings.model_dump(mode="json")
    reports = Reports(settings.report, folder.path, dumped, folder.path.name, said=progress.said)
    stack.callback(reports.close)
    exact, temperature = engine.capabilities.exact, settings.sampling.temperature
    learner = Learner(policy, settings.algorithm, exact=exact, temperature=temperature)
    thread = stack.enter_context(OwnThread("learning"))
    folder.describe(settings, job.model, engine.capabilities.name)
    training = Training(
        job, folder, engine, policy, learner, progress, metrics, reports, writer, thread, step, saved=step
    )
    if found:
        chance.resume(found.folder)
    else:
        chance.begin(settings.seed)
    for measured in history:  # What was alarming then was told then.
        training.alarms.look(measured)
    return training


def _policy(job: Job, found: Checkpoint | None) -> Policy:
    policy = Policy.load(job.model, job.settings.update, eyes=job.template.eyes)
    if found:
        policy.resume(found.folder)
    return policy

"""Starts or resumes a training run: checks everything, loads the model, starts the engine, and runs the loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from trainer.distributed.rank_environment import RESTARTS_KEY, RankRestarts, count_restarts
from trainer.distributed.settings import count_ranks, find_mesh
from trainer.engine.base import Capabilities, CountsTokens, Engine
from trainer.engines import engine_notes
from trainer.policy import rng
from trainer.policy.memory_parts import MemoryPart
from trainer.policy.memory_plan import plan_other_rank
from trainer.policy.optimizers import describe_rates, keep_choices
from trainer.policy.policy import Policy
from trainer.policy.update import PolicyUpdater
from trainer.setup import trust_model
from trainer.storage.rollout_file import RolloutWriter, resume_hint
from trainer.storage.run_files import LOGS_FOLDER, METRICS_FILE, MetricsWriter
from trainer.storage.run_status import StatusFile
from trainer.train import modes
from trainer.train.alarms import Alarms
from trainer.train.checkpoint import Checkpoint
from trainer.train.early_stop import EarlyStop
from trainer.train.evaluate import compare_run
from trainer.train.job import Job, JobObjects, open_job
from trainer.train.preflight import choose_micro_batch, plan_job, require_ready
from trainer.train.reporters import Reporters, import_packages
from trainer.train.run_folder import (
    RunFolder,
    changed_settings,
    find_changed_data,
    fingerprint_tasks,
    use_start_model,
)
from trainer.train.settings import TrainSettings
from trainer.train.train_loop import TrainLoop
from trainer.view.progress import show_warm_start
from trainer.view.training_progress import TrainingProgress
from trainer.worker_thread import WorkerThread

if TYPE_CHECKING:
    from trainer.distributed.rank_commands import LeaderChannel


async def train(
    settings: TrainSettings,
    path: Path,
    console: Console,
    *,
    resume: bool = False,
    objects: JobObjects | None = None,
) -> None:
    """Runs a training run in a folder. Whatever can be wrong is checked before the weights are loaded."""
    import_packages(settings.report)
    with RunFolder(path, settings.checkpoint.keep) as folder:
        checkpoint = find_checkpoint(folder, settings, console, resume=resume)
        step = checkpoint.step if checkpoint else 0
        trust_model(settings, path)
        located = use_start_model(path, settings) if resume else settings
        async with AsyncExitStack() as stack:
            tape = folder.new_tape(step + 1) if settings.record else None
            with show_warm_start(console) as on_progress:
                opening = open_job(
                    _keep_choices(located, folder) if resume else located,
                    tape=tape,
                    on_warm_start=on_progress,
                    objects=objects,
                )
                job = await stack.enter_async_context(opening)
            await to_thread.run_sync(choose_micro_batch, job)
            for note in await to_thread.run_sync(require_ready, job):
                console.print(f"warning: {note.text}\n  remedy: {note.remedy}", markup=False, soft_wrap=True)
            loop = await _build_train_loop(job, settings, folder, checkpoint, stack, console)
            with _frozen_garbage_collection(), loop.machine:
                await loop.run()
        if settings.evaluation.after:
            console.print("comparing the model before and after training", markup=False)
            console.print((await compare_run(folder.path, None, None, console, objects)).table)


@contextmanager
def _frozen_garbage_collection() -> Iterator[None]:
    """Exempts the objects that exist now from garbage collection, which took a twentieth of each step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def find_checkpoint(folder: RunFolder, settings: TrainSettings, console: Console, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to resume from; None for a new run, and if the run ended before its first one. Raises ConfigError
    if the folder has a run that is not to be resumed, or cannot be with these settings."""
    if not resume:
        if folder.has_run:
            remedy = "continue it with --resume, or name another folder with --out"
            raise ConfigError("the folder already has a run", file=folder.path, remedy=remedy)
        return None
    saved = folder.load_settings()
    resumed = settings.model_copy(update={"update": keep_choices(settings.update, saved.update)})
    changed = changed_settings(saved, resumed)
    if changed:
        remedy = "undo these changes to resume the run, or start another one without --resume"
        raise ConfigError(f"the run has other settings: {'; '.join(changed)}", file=folder.path, remedy=remedy)
    return folder.checkpoints.find_latest(lambda text: console.print(text, markup=False, soft_wrap=True))


def _keep_choices(settings: TrainSettings, folder: RunFolder) -> TrainSettings:
    """The settings; what they leave open, and is chosen at a start, is as the run was started with."""
    return settings.model_copy(update={"update": keep_choices(settings.update, folder.load_settings().update)})


async def _build_train_loop(
    job: Job,
    given: TrainSettings,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    stack: AsyncExitStack,
    console: Console,
) -> TrainLoop:
    """`given` are the settings as they were written, which all ranks compare, and whose paths the run keeps."""
    settings, step = job.settings, checkpoint.step if checkpoint else 0
    logs = folder.path / LOGS_FOLDER
    ranks = count_ranks(settings.distributed)
    placement = await to_thread.run_sync(plan_job, job)
    kept = given.model_copy(update={"update": settings.update})
    dumped = kept.model_dump(mode="json")
    written = given.model_dump(mode="json")
    needs = await to_thread.run_sync(_plan_other_ranks, job, ranks)
    channel = await stack.enter_async_context(_open_ranks(job, ranks, written, logs, needs))
    policy = await to_thread.run_sync(_load_policy, job, checkpoint, channel)
    log = partial(console.print, markup=False, soft_wrap=True)
    data = await to_thread.run_sync(fingerprint_tasks, job)
    for name in find_changed_data(folder.path, step, data):
        log(f"{name} has changed since the run was started: steps from {step + 1} on train on the rows as they are now")
    serving = placement.apply_to(settings.serving)
    if placement.fraction is not None:
        log(str(placement))  # Before the server starts: it helps if the start fails.
    engine = await stack.enter_async_context(job.make_engine(logs, policy, log, serving))
    if engine.version != step:
        await engine.publish(await to_thread.run_sync(lambda: policy.weights), step)
    await stack.enter_async_context(job.open_player(engine, logs, log, is_last=not settings.evaluation.after))
    for note in _describe_run(job, engine, channel, is_resumed=given.update.lr != job.given_update.lr):
        log(note)
    if checkpoint:
        job.task_stream.restore(checkpoint.state["position"])
    if missing := folder.truncate(checkpoint.state["rollouts"] if checkpoint else 0, step):
        log(f"rollouts.jsonl lacks {missing} bytes of rollouts before step {step + 1}; training is not affected")
    metrics = stack.enter_context(MetricsWriter(folder.path / METRICS_FILE))
    history = metrics.truncate_after(step if checkpoint else -1)  # Without a checkpoint, step 0 is repeated too.
    writer = stack.enter_context(RolloutWriter(folder.path, resume_hint(folder.path)))
    progress = stack.enter_context(TrainingProgress(settings.steps, console=console, history=history))
    stack.enter_context(StatusFile(folder.path, progress.status))
    reporters = Reporters(settings.report, folder.path, dumped, folder.path.name, warn=progress.print_message)
    stack.callback(reporters.close)
    updater = await to_thread.run_sync(
        partial(_make_updater, policy, settings, engine.capabilities, is_leading=channel is not None)
    )
    updater.on_pass = progress.on_pass
    if isinstance(engine, CountsTokens):
        progress.read_sampled = partial(getattr, engine, "sampled_tokens")
    thread = stack.enter_context(WorkerThread("learning"))
    folder.write_run_info(kept, job.model, engine.capabilities.name, step, data)
    restarts = _count_restarts(ranks, checkpoint)
    _show_processes(progress, job, restarts)
    loop = TrainLoop(
        job, folder, engine, policy, updater, progress, metrics, reporters, writer, thread, step, saved_step=step
    )
    loop.restarts, loop.early_stop = restarts, EarlyStop(settings.early_stop, history)
    if checkpoint:
        rng.restore_state(checkpoint.folder)
    else:
        rng.seed_all(settings.seed)
    loop.alarms = Alarms(settings.n, job.template.tokenizer.size)
    for step_metrics in history:  # Alarms about these steps were printed then.
        loop.alarms.check(step_metrics)
    return loop


def _open_ranks(
    job: Job, ranks: int, written: Mapping[str, Any], logs: Path, needs: tuple[MemoryPart, ...]
) -> AbstractAsyncContextManager[LeaderChannel | None]:
    """Starts and connects the other ranks; a process that trains alone imports none of that."""
    if ranks == 1:
        return nullcontext()
    from trainer.distributed.lead import open_ranks

    return open_ranks(job.settings.distributed, written, job.model, logs, needs)


def _count_restarts(ranks: int, checkpoint: Checkpoint | None) -> RankRestarts | None:
    """How often the ranks were started again, if there are several."""
    saved = checkpoint.state.get(RESTARTS_KEY, 0) if checkpoint else 0
    return RankRestarts(ranks, count_restarts(), saved) if ranks > 1 else None


def _show_processes(progress: TrainingProgress, job: Job, restarts: RankRestarts | None) -> None:
    """Has the panel show the states of rollout workers and ranks."""
    if job.engine_player is not None:
        progress.describe_workers = job.engine_player.describe
    if restarts is not None:
        progress.describe_ranks = restarts.describe


def _plan_other_ranks(job: Job, ranks: int) -> tuple[MemoryPart, ...]:
    """The memory that each rank but the first needs."""
    settings, distributed, tokens = job.settings, job.settings.distributed, job.settings.limits.rollout_tokens
    mesh = find_mesh(distributed, ranks)
    shards = mesh["shard"] * mesh["tensor"]
    return plan_other_rank(job.model, settings.update, settings.algorithm, shards, tokens, distributed)


def _describe_run(job: Job, engine: Engine, channel: LeaderChannel | None, *, is_resumed: bool) -> Iterator[str]:
    """What the operator should know about how the run is played and trained."""
    if channel:
        yield f"{channel.ranks.size} ranks train together"
    yield f"rollouts are generated by the {engine.capabilities.name} engine"
    if job.settings.mode != "synchronous":
        yield modes.describe_mode(job.settings)
    yield from engine_notes(engine.capabilities)
    yield from job.tasks.notes
    yield describe_rates(job.given_update, job.settings.update, job.parameters, is_resumed=is_resumed)


def _make_updater(policy: Policy, settings: TrainSettings, engine: Capabilities, *, is_leading: bool) -> PolicyUpdater:
    """Makes the updater, here or on all ranks."""
    make: Any = PolicyUpdater
    if is_leading:
        from trainer.distributed.lead import LeadUpdater

        make = LeadUpdater
    updater: PolicyUpdater = make(
        policy,
        settings.algorithm,
        exact=engine.is_exact,
        temperature=settings.sampling.temperature,
        deterministic=settings.deterministic,
    )
    return updater


def _load_policy(job: Job, checkpoint: Checkpoint | None, channel: LeaderChannel | None) -> Policy:
    """Loads the policy here, or on all ranks."""
    update, processor = job.settings.update, job.template.image_processor
    if channel:
        from trainer.distributed.lead import LeadPolicy

        policy: Policy = LeadPolicy.lead(channel, job.model, update, processor)
    else:
        policy = Policy.load(job.model, update, image_processor=processor)
    if checkpoint:
        policy.resume(checkpoint.folder)
    return policy

"""Replays a recorded training step and compares ids, masks, rewards and loss.

The tape answers the tool calls, and the recorded ledgers replace the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from gateway.tape import ReplayGateway
from gateway.types import EMPTY
from trainer.algorithms.train_batch import build_train_batch, has_learning_signal
from trainer.policy.policy import Policy
from trainer.policy.update import PolicyUpdater
from trainer.replay_rollouts import RecordedPolicy, describe_difference, replayable_rollouts
from trainer.reward.scorer import ScoredGroup
from trainer.rollout.observer import NullObserver
from trainer.rollout.rollout import Rollout
from trainer.rollout.task import Task
from trainer.setup import trust_model
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import METRICS_FILE, StepMetrics, read_metrics
from trainer.train.checkpoint import Checkpoint
from trainer.train.collect import group_order
from trainer.train.job import Job, open_job
from trainer.train.run_folder import RunFolder, use_start_model
from trainer.train.settings import TrainSettings

COMPARED_METRICS = ("loss", "update/grad_norm")
"""Metrics that are determined by a step's rollouts and weights."""


async def replay_step(run: Path, step: int, console: Console) -> bool:
    """Returns True if ids, masks, rewards and loss equal the recorded ones."""
    folder = RunFolder(run)
    settings, tape = folder.load_settings(), folder.find_tape(step)
    checkpoint = folder.checkpoints.find_before(step)
    recorded = _load_recorded_steps(run, checkpoint.step + 1 if checkpoint else 1, step)
    if tape is None:
        raise ConfigError("the run has no tape", file=run, remedy="make the run with `record: true`")
    settings = use_start_model(run, settings)
    trust_model(settings, run)
    before = recorded[step].metrics
    async with _open_replay(settings, tape) as job:
        _restore_tasks(job, recorded)

        def log(text: str) -> None:
            console.print(text, markup=False, soft_wrap=True)

        differing = await _replay_rollouts(job, recorded[step], log)
        count = len(recorded[step].rollouts)
        console.print(f"replayed {count} rollouts of step {step}; {differing} differ")
        after = await to_thread.run_sync(_replay_updates, job, checkpoint, recorded, console)
    changed = [name for name in COMPARED_METRICS if after.get(name) != before.get(name)]
    for name in changed:
        console.print(f"{name} was {before.get(name)!r}, and is now {after.get(name)!r}", markup=False)
    if not changed:
        loss = f"the loss is {before['loss']!r}" if "loss" in before else "the step trained on nothing"
        console.print(f"{loss}, as recorded", markup=False)
    return not differing and not changed


@asynccontextmanager
async def _open_replay(settings: TrainSettings, tape: Path) -> AsyncIterator[Job]:
    """The job, with a tape that answers for tools and environments."""
    with ExitStack() as stack:
        for part in settings.parts:
            stack.enter_context(part.replay(tape))
        async with open_job(settings, gateway=ReplayGateway(tape)) as job:
            yield job


@dataclass
class _RecordedStep:
    """A recorded step."""

    metrics: StepMetrics
    rollouts: Sequence[Rollout]
    tasks: Mapping[str, Task]
    """By the names of groups, as the curriculum changed them."""


def _load_recorded_steps(run: Path, first: int, step: int) -> dict[int, _RecordedStep]:
    """All steps up to this one; from the `first` that has to be replayed, with their rollouts."""
    by_step: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in Rollouts(run):
        number = rollout.step or group_order(rollout.group)[0]
        if first <= number <= step:
            by_step[number].append(rollout)
    if step not in by_step:
        raise ConfigError(f"the run has no rollouts of step {step}", file=run, remedy="name a finished step, from 1")
    metrics_by_step = {int(metrics["step"]): metrics for metrics in read_metrics(run / METRICS_FILE)}
    if step not in metrics_by_step:
        raise ConfigError(f"the run has no metrics of step {step}", file=run, remedy="name a finished step")
    return {
        number: _RecordedStep(metrics, by_step[number], {})
        for number, metrics in metrics_by_step.items()
        if 0 < number <= step
    }


def _restore_tasks(job: Job, recorded: Mapping[int, _RecordedStep]) -> None:
    """Finds the tasks of groups, as the curriculum's stage at the time changed them."""
    wanted = {rollout.task for step in recorded.values() for rollout in step.rollouts}
    sources = {
        name: {task.id: task for task in source if task.id in wanted} for name, source in job.tasks.train.items()
    }
    stages = [job.task_stream.stage]  # Indexed by the version at which a group started.
    for number, step in recorded.items():
        tasks: dict[str, Task] = {}
        for rollouts in _by_group(step.rollouts).values():
            group, id, stage = rollouts[0].group, rollouts[0].task, stages[_start_version(rollouts, number - 1)]
            if id not in sources[stage.data]:
                file = stage.data or job.settings.data
                raise ConfigError(
                    f"the task {id!r} is missing", file=file, remedy="replay with the data that the run was made with"
                )
            tasks[group] = stage.apply(sources[stage.data][id])
        step.tasks = tasks
        job.task_stream.finish_step(number - 1, step.metrics.get("success/sampled"))
        stages.append(job.task_stream.stage)


def _start_version(rollouts: Sequence[Rollout], default: int) -> int:
    """The policy version at which a group started: from its name, or the oldest version that sampled it."""
    step, version = group_order(rollouts[0].group)[:2]
    if not step:
        return version
    return min((version for rollout in rollouts for version in rollout.versions), default=default)


async def _replay_rollouts(job: Job, step: _RecordedStep, log: Callable[[str], None]) -> int:
    """Returns how many rollouts differ. Groups are scored together, since a reward function may see all of a group."""
    recorded = {
        (rollout.group, rollout.index): (rollout, attempt) for rollout, attempt in replayable_rollouts(step.rollouts)
    }
    replayed: dict[tuple[str, int], Rollout] = {}
    for (group, index), (before, attempt) in recorded.items():
        engine = RecordedPolicy(before)
        async with engine:
            runner = job.make_runner(engine, NullObserver())
            after = await runner.run(step.tasks[before.group], group=group, index=index, attempt=attempt)
        replayed[group, index] = after
    complete = list(_complete_groups(replayed.values()))  # With what tools and agents gave at the end.
    replayed = {key: replace(rollout, rewards=EMPTY) for key, rollout in replayed.items()}
    for siblings in complete:
        scored_group = await job.scorer.score(step.tasks[siblings[0].group], siblings)
        replayed |= {(scored.rollout.group, scored.rollout.index): scored.rollout for scored in scored_group.scored}
    differing = 0
    for key, (before, _) in recorded.items():
        if difference := describe_difference(before, replayed[key]):
            differing += 1
            log(f"{before.task} {before.group}/{before.index}: {difference}")
    return differing


def _replay_updates(
    job: Job, checkpoint: Checkpoint | None, recorded: Mapping[int, _RecordedStep], console: Console
) -> Mapping[str, float]:
    """Repeats the updates from the last checkpoint before the step; returns the metrics of the step's update."""
    policy = Policy.load(job.model, job.settings.update)
    if checkpoint:
        policy.resume(checkpoint.folder)
    first, last = checkpoint.step + 1 if checkpoint else 1, max(recorded)
    # The metrics say whether the engine's logprobs were used as exact, or old logprobs were recomputed.
    exact = all(recorded[number].metrics.get("mismatch/pass_skipped") != 0 for number in range(first, last + 1))
    algorithm, temperature = job.settings.algorithm, job.settings.sampling.temperature
    updater = PolicyUpdater(
        policy, algorithm, exact=exact, temperature=temperature, deterministic=job.settings.deterministic
    )
    metrics: Mapping[str, float] = EMPTY
    console.print(f"replaying the updates of steps {first} to {last}", markup=False)
    for number in range(first, last + 1):
        groups = list(_recorded_groups(job, recorded[number]))
        batch = build_train_batch(groups, algorithm, job.token_weight_fn, number - 1)
        metrics = updater.train_step(batch) if groups else EMPTY
    return metrics


def _recorded_groups(job: Job, step: _RecordedStep) -> Iterator[ScoredGroup]:
    """The groups that the step trained on, with their recorded scores."""
    settings = job.settings
    for siblings in _complete_groups(step.rollouts):
        group = job.scorer.score_recorded(step.tasks[siblings[0].group], siblings)
        # Groups of the last draw are never replaced, and asynchronous groups that name their step were trained on.
        named_step, draw = group_order(siblings[0].group)[:2]
        is_replaceable = named_step and draw < settings.algorithm.dynamic_sampling
        if group.scored and (not is_replaceable or has_learning_signal(group, settings.algorithm)):
            yield group


def _by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    return groups


def _complete_groups(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    """The groups that were not dropped, in the order of their start, without rollouts lost to infrastructure."""
    groups = _by_group(rollout for rollout in rollouts if not rollout.stop.is_infrastructure)
    for name in sorted(groups, key=group_order):
        yield sorted(groups[name], key=lambda rollout: rollout.index)

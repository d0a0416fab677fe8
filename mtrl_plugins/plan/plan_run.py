"""Plans a run file or a run on devices, or on the machine of a measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.errors import ConfigError
from mtrl_plugins.plan.choose_split import (
    Plan,
    PlannedSplit,
    Question,
    choose_split,
)
from mtrl_plugins.plan.speeds import find_device, measure_model
from mtrl_plugins.plan.workload import (
    MeasuredRun,
    Workload,
    default_workload,
    describe_defaults,
    describe_workload,
    read_run,
)
from trainer.distributed.settings import DistributedSettings
from trainer.train.settings import TrainSettings

BUSY_HOST = 0.8
"""The share of its time from which on the process that plays rollouts holds up the engines."""
FEW_OF_ROOM = 0.5
"""The share of the sequences that fit, below which `concurrency.running_requests` is named as the limit."""


@dataclass(frozen=True)
class PlanOptions:
    """What the operator asks for besides the run."""

    gpus: int
    device: str
    tp: int = 1
    tool_seconds: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class PlannedRun:
    """A plan with what it was made from."""

    options: PlanOptions
    plan: Plan
    workload: str
    notes: tuple[str, ...]


def plan_run(settings: TrainSettings, model: Path, runs: Sequence[Path], options: PlanOptions) -> PlannedRun:
    """Simulates a run on devices. Raises ConfigError for what cannot be planned."""
    for name in ("tensor_parallel", "offload"):
        if getattr(settings.distributed, name) != DistributedSettings.model_fields[name].default:
            problem = "plans know no tensor parallelism of the trainer and no offloading to the host's memory"
            raise ConfigError(problem, field=f"distributed.{name}", remedy="leave it out to plan the run without it")
    device = find_device(options.device)
    measured = [read_run(run) for run in runs]
    workload, notes = make_workload(settings, measured, options)
    question = Question(
        settings, workload, measure_model(model, settings), device, options.gpus, options.tp, options.seed
    )
    plan = choose_split(question)
    notes += [*_notes(plan.recommended, settings, question), f"peak figures of {device.name}: {device.source}"]
    return PlannedRun(options, plan, describe_workload(workload), tuple(notes))


def make_workload(
    settings: TrainSettings, measured: Sequence[MeasuredRun], options: PlanOptions
) -> tuple[Workload, list[str]]:
    """What rollouts are drawn from, within a job's limits, and notes about it."""
    notes = []
    if measured:
        groups = tuple(group for run in measured for group in run.workload.groups)
        first = measured[0].workload
        workload = replace(first, groups=groups)
        if settings.limits.assistant_turns > max(run.settings.limits.assistant_turns for run in measured):
            notes.append("the run allows more turns than those measured: rollouts that were cut off there stay short")
    else:
        workload, notes = default_workload(settings, options.seed), [describe_defaults(settings)]
    workload = workload.limit(settings.limits.assistant_turns, settings.limits.turn_tokens)
    if options.tool_seconds is not None:
        workload = workload.with_tool_seconds(options.tool_seconds)
    return workload, notes


def _notes(best: PlannedSplit, settings: TrainSettings, question: Question) -> list[str]:
    """What holds the best split up, with the setting that changes it."""
    notes, simulation, servers = [], best.simulation, best.split.servers
    slots = settings.concurrency.running_requests / servers
    running = min(part.size for part in best.server.parts[1:2])
    room = best.server.available - best.server.needed + running
    sequences = room * question.tp / question.model.kv_bytes / question.rollout_tokens
    if slots < FEW_OF_ROOM * sequences and simulation.running > FEW_OF_ROOM * slots:
        notes.append(
            f"`concurrency.running_requests: {settings.concurrency.running_requests}` is {slots:.3g} sequences for each"
            f" server, which has room for {sequences:.0f}: raise it, and `concurrency.inflight_rollouts` with it"
        )
    if simulation.host_busy > BUSY_HOST:
        notes.append(
            f"what plays rollouts is busy {simulation.host_busy:.0%} of the time and holds up the engines: raise"
            " `rollout.workers`"
        )
    if simulation.dropped:
        notes.append("groups are dropped as too stale: raise `max_staleness`, or lower `concurrency.inflight_rollouts`")
    return notes

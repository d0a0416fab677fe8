"""Plans a run file or a run on devices, or on the machine of a measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.errors import ConfigError
from mtrl_plugins.plan.calibrate import measured_engine_speed, measured_trainer_speed, optimizer_steps, update_passes
from mtrl_plugins.plan.choose_split import (
    MODES,
    STEPS_AHEAD,
    Plan,
    PlannedSplit,
    Question,
    Split,
    choose_split,
    find_best,
)
from mtrl_plugins.plan.simulate import simulate
from mtrl_plugins.plan.speeds import CPU, Cluster, find_device, measure_model
from mtrl_plugins.plan.workload import (
    JobLimits,
    MeasuredRun,
    Workload,
    default_workload,
    describe_defaults,
    describe_workload,
    read_run,
)
from trainer.distributed.settings import DistributedSettings
from trainer.policy.memory_parts import MemoryPlan
from trainer.policy.memory_plan import plan_memory
from trainer.train.settings import TrainSettings

CPU_STEPS = 8
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
    if options.device.lower() != CPU:
        find_device(options.device)
    measured = [read_run(run) for run in runs]
    workload, notes = make_workload(settings, measured, options)
    if options.device.lower() == CPU:
        plan = _plan_machine(settings, model, measured, workload, options)
        notes += ["engine and trainer share the machine's cores: each takes twice as long while both work"]
    else:
        device = find_device(options.device)
        size = measure_model(model, settings)
        question = Question(settings, workload, size, device, options.gpus, options.tp, options.seed)
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


def _plan_machine(
    settings: TrainSettings, model: Path, measured: Sequence[MeasuredRun], workload: Workload, options: PlanOptions
) -> Plan:
    """All modes on the machine that runs were measured on, where trainer and engine share the cores."""
    if not measured:
        remedy = "name a synchronous run that this machine made with --from"
        raise ConfigError("the speed of a cpu is taken from a measured run", field="--device", remedy=remedy)
    if options.gpus != 1 or options.tp != 1:
        raise ConfigError(
            "a cpu is planned as one device", field="--gpus", remedy="write --gpus 1, without --servers-tp"
        )
    memory = plan_memory(settings, model)
    rank = MemoryPlan(memory.parts[2:], memory.available)
    server = MemoryPlan(memory.parts[:2], memory.available)
    splits = []
    for mode in MODES:
        limits = replace(JobLimits.from_settings(settings), mode=mode)
        simulation = simulate(
            limits,
            workload,
            measured_cluster(settings, measured),
            steps=CPU_STEPS,
            warmup=STEPS_AHEAD.get(mode, limits.max_staleness + 1),
            seed=options.seed,
        )
        split = Split(mode, 1, 1, is_together=True)
        splits.append(PlannedSplit(split, simulation, 1.0, rank, server, devices=1))
    return Plan(tuple(splits), find_best(splits))


def measured_cluster(settings: TrainSettings, measured: Sequence[MeasuredRun]) -> Cluster:
    """The machine of measured runs, for a job's updates."""
    trainer = measured_trainer_speed(measured)
    trainer = replace(
        trainer,
        token_s=trainer.token_s * update_passes(settings, exact=True),
        fixed_s=trainer.fixed_s * optimizer_steps(settings),
    )
    return Cluster(1, measured_engine_speed(measured), trainer, is_shared=True)


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

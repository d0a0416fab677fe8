"""Speeds of a machine from measured runs, and of devices from their data sheets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import combinations
from statistics import median

import numpy

from gateway.errors import ConfigError
from mtrl_plugins.plan.speeds import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    HALF_BYTES,
    Device,
    EngineSpeed,
    ModelSize,
    TrainerSpeed,
)
from mtrl_plugins.plan.workload import MeasuredRun, TimedTurn
from trainer.policy.memory_plan import FLOAT_BYTES
from trainer.train.settings import TrainSettings

LAUNCH_S = 0.002
"""Seconds of a decode step besides reading and arithmetic. An assumption."""
EXCHANGE_S = 20e-6
"""Seconds for each layer in which the devices of a server exchange their sums. An assumption."""
OPERATIONS = 2
"""Operations for each parameter and token in a forward pass; a backward pass takes twice as many."""
STATE_BYTES = 28
"""Bytes that an optimizer step reads and writes for each trained parameter: weight, gradient and two moments."""


def update_passes(settings: TrainSettings, *, exact: bool) -> float:
    """Forward passes that an update is worth for each token."""
    update = settings.update
    passes = float(update.epochs * (4 if update.gradient_checkpointing else 3))
    if update.epochs * update.minibatches > 1 and not exact:
        passes += 1  # The logprobs of the policy before the step.
    return passes + (1 if settings.algorithm.kl.coefficient else 0)


def optimizer_steps(settings: TrainSettings) -> int:
    """Optimizer steps of an update."""
    return settings.update.epochs * settings.update.minibatches


def engine_speed(model: ModelSize, device: Device, tp: int, max_running: int) -> EngineSpeed:
    """A server of `tp` devices."""
    bandwidth, flops = tp * BANDWIDTH_EFFICIENCY * device.bandwidth, tp * COMPUTE_EFFICIENCY * device.flops
    exchange_s = model.layers * EXCHANGE_S if tp > 1 else 0.0
    token_s = OPERATIONS * model.numbers / flops
    return EngineSpeed(
        LAUNCH_S + exchange_s + model.server_bytes / bandwidth,
        context_s=model.kv_bytes / bandwidth,
        floor_s=token_s,
        prefill_s=token_s,
        max_running=max(1, max_running),
    )


def trainer_speed(
    model: ModelSize, device: Device, ranks: int, devices: int, settings: TrainSettings, step_tokens: float
) -> TrainerSpeed:
    """All ranks of a trainer. Weights are gathered for every pass over a micro-batch; where that takes longer than the
    arithmetic, it is what counts."""
    passes, steps = update_passes(settings, exact=False), optimizer_steps(settings)
    arithmetic_s = passes * OPERATIONS * model.numbers / (COMPUTE_EFFICIENCY * device.flops * ranks)
    link = device.link_to(ranks)
    gathered_s = HALF_BYTES * model.numbers * (ranks - 1) / ranks / link
    micro_batches = max(1.0, step_tokens / max(1, settings.update.micro_batch_tokens) / ranks)
    per_token_s = passes * gathered_s * micro_batches / max(1.0, step_tokens)
    optimizer_s = STATE_BYTES * model.trained / ranks / (BANDWIDTH_EFFICIENCY * device.bandwidth)
    reduced_s = FLOAT_BYTES * model.trained * (ranks - 1) / ranks / link
    publish_s = model.server_bytes / device.link_to(devices)
    return TrainerSpeed(max(arithmetic_s, per_token_s), steps * (optimizer_s + reduced_s), publish_s)


def measured_engine_speed(runs: Sequence[MeasuredRun]) -> EngineSpeed:
    """The speed that fits the turns of runs whose rollouts start together: a turn takes, for each of its tokens, a step
    with as many sequences as ran meanwhile. Reading prompts is not told apart from that: it is in the steps' time."""
    rows: list[tuple[tuple[float, ...], float]] = []
    for run in runs:
        if run.settings.mode == "synchronous":
            for groups in run.steps.values():
                rows += _turn_costs([turn for group in groups.values() for turns in group for turn in turns])
    if not rows:
        remedy = "measure a few steps with `mode: synchronous` on this machine, and name that run with --from"
        raise ConfigError("no synchronous run was measured, which the speed of a cpu is taken from", remedy=remedy)
    fixed_s, sequence_s = fit_costs(rows)
    return EngineSpeed(fixed_s, sequence_s)


def _turn_costs(turns: Sequence[TimedTurn]) -> list[tuple[tuple[float, ...], float]]:
    """For each turn of a step: its tokens, the same times the sequences that ran meanwhile; and its seconds."""
    starts, ends = sorted(turn.start_s for turn in turns), sorted(turn.end_s for turn in turns)
    times = sorted({*starts, *ends})
    areas, area, last = [], 0.0, times[0]
    for time in times:
        area += (bisect_right(starts, last) - bisect_right(ends, last)) * (time - last)
        areas.append(area)
        last = time
    place = {time: index for index, time in enumerate(times)}
    costs: list[tuple[tuple[float, ...], float]] = []
    for turn in turns:
        seconds = turn.end_s - turn.start_s
        if seconds <= 0 or not turn.script.written:
            continue
        running = (areas[place[turn.end_s]] - areas[place[turn.start_s]]) / seconds
        costs.append(((turn.script.written, turn.script.written * running), seconds))
    return costs


def measured_trainer_speed(runs: Sequence[MeasuredRun]) -> TrainerSpeed:
    """The speed that fits the updates of runs, for one forward pass and one optimizer step."""
    rows = []
    for run in runs:
        passes, steps = update_passes(run.settings, exact=True), optimizer_steps(run.settings)
        for metrics in run.metrics:
            tokens = metrics.get("update/row_tokens") or _row_tokens(run, metrics)
            if tokens and metrics.get("update/rows", 1.0):
                rows.append(((float(steps), passes * tokens), metrics.get("time/learning_s", 0.0)))
    if not rows:
        remedy = "measure a run in which some rollouts of a group do better than others"
        raise ConfigError("no step of the measured runs had a gradient", remedy=remedy)
    fixed_s, token_s = fit_costs(rows)
    publish_s = median(metrics.get("time/publishing_s", 0.0) for run in runs for metrics in run.metrics)
    return TrainerSpeed(token_s, fixed_s, publish_s)


def _row_tokens(run: MeasuredRun, metrics: dict[str, float]) -> float:
    """Tokens of a step's rows with a gradient, as the simulation counts them."""
    groups = run.steps.get(int(metrics["step"]), {})
    total = sum(
        sum(turns[-1].script.prompt + turns[-1].script.written for turns in group)
        - (len(group) - 1) * min(group[0][0].script.prompt, *(turns[-1].script.prompt for turns in group))
        for group in groups.values()
    )
    rows, idle = metrics.get("update/rows", 1.0), metrics.get("update/idle", 0.0)
    return total * rows / (rows + idle) if rows else 0.0


def fit_costs(rows: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Costs for each column that are not negative and whose sums fit the measured seconds best, weighed so that a long
    turn counts no more than its length."""
    columns = range(len(rows[0][0]))
    best, least = tuple(0.0 for _ in columns), float("inf")
    seconds = numpy.sqrt([cost for _, cost in rows if cost > 0])
    values = numpy.array([values for values, cost in rows if cost > 0]).reshape(-1, len(columns)) / seconds[:, None]
    for chosen in (list(some) for count in columns for some in combinations(columns, count + 1)):
        solved, _, rank, _ = numpy.linalg.lstsq(values[:, chosen], seconds, rcond=1e-9)
        error = float(((values[:, chosen] @ solved - seconds) ** 2).sum())
        if rank == len(chosen) and solved.min() >= 0 and error < least:
            found = dict(zip(chosen, map(float, solved), strict=True))
            best, least = tuple(found.get(column, 0.0) for column in columns), error
    return best

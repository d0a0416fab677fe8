"""Tries splits of the devices between trainer and engines in each mode, and finds the fastest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm
from statistics import fmean

from gateway.errors import ConfigError
from mtrl_plugins.plan.calibrate import engine_speed, trainer_speed
from mtrl_plugins.plan.simulate import Simulation, simulate
from mtrl_plugins.plan.speeds import Cluster, Device, ModelSize, cache_room, plan_rank, plan_server
from mtrl_plugins.plan.workload import JobLimits, Workload
from mtrl_plugins.workers.settings import WorkerSettings
from trainer.policy.memory_parts import MemoryPlan
from trainer.train.settings import TrainSettings

MODES = ("synchronous", "one_step_off", "asynchronous")
PARTS = 16
"""Splits are tried in parts of the devices as coarse as this, and only every second one but next to the best."""
SEARCHED_ROLLOUTS = 1000
"""Rollouts of a step while splits are compared; a larger job is compared by a part of it, and the best split is then
simulated in full."""
SEARCHED_STEPS = 3
FULL_STEPS = 1
ALIKE = 0.98
"""Splits that make this share of the best one's tokens are as good: so much the draws alone make."""
STEPS_AHEAD = {"synchronous": 0, "one_step_off": 1}
"""Steps until a mode's queues are full; in asynchronous mode as many as `max_staleness` and one."""


@dataclass(frozen=True)
class Question:
    """What is planned: a job on devices."""

    settings: TrainSettings
    workload: Workload
    model: ModelSize
    device: Device
    devices: int
    tp: int
    seed: int = 0

    @property
    def shard(self) -> int | None:
        """Ranks that share a copy of the weights; None for all."""
        return self.settings.distributed.shard

    @property
    def rollout_tokens(self) -> float:
        """The mean length of a rollout at its end."""
        scripts = [script for group in self.workload.groups for script in group]
        return fmean(script[-1].prompt + script[-1].written for script in scripts)

    @property
    def step_tokens(self) -> float:
        """Tokens of a step's rows with a gradient, without what siblings share."""
        return self.settings.prompts * self.settings.n * self.rollout_tokens * self.workload.signal_share


@dataclass(frozen=True)
class Split:
    """Devices of the trainer and of the servers in a mode. Together, all devices do both by turns."""

    mode: str
    trainer: int
    servers: int
    is_together: bool = False


@dataclass(frozen=True)
class PlannedSplit:
    """A split with its simulation and its memory."""

    split: Split
    simulation: Simulation
    part: float
    """The share of the job that was simulated."""
    rank: MemoryPlan
    server: MemoryPlan

    devices: int

    @property
    def tokens_per_s(self) -> float:
        return self.simulation.tokens_per_s / self.part

    @property
    def idle(self) -> float:
        """The share of all devices' time in which they did nothing."""
        simulation, split = self.simulation, self.split
        if split.is_together:
            return max(0.0, simulation.engine_idle + simulation.trainer_idle - 1)
        trainer = split.trainer / self.devices
        return trainer * simulation.trainer_idle + (1 - trainer) * simulation.engine_idle


@dataclass(frozen=True)
class Plan:
    """All splits that were simulated, and the best one."""

    splits: tuple[PlannedSplit, ...]
    recommended: PlannedSplit

    def best(self, mode: str) -> PlannedSplit | None:
        """The best split of a mode."""
        of_mode = [planned for planned in self.splits if planned.split.mode == mode]
        return find_best(of_mode) if of_mode else None


def choose_split(question: Question) -> Plan:
    """Simulates splits of all modes. Raises ConfigError if the model fits none."""
    if question.devices % question.tp:
        problem = f"{question.devices} devices cannot be divided into servers of {question.tp}"
        raise ConfigError(problem, field="--servers-tp", remedy="name a divisor of --gpus")
    planned = [planned for mode in MODES for planned in _search_mode(question, mode)]
    if not planned:
        raise _does_not_fit(question)
    best = find_best(planned)
    if best.part < 1:
        full = plan_split(question, best.split, 1.0, FULL_STEPS)
        planned[planned.index(best)] = full
        best = full
    return Plan(tuple(planned), best)


def find_best(planned: Sequence[PlannedSplit]) -> PlannedSplit:
    """The fastest split; of those that are as good as alike, the one that leaves the least idle."""
    most = max(each.tokens_per_s for each in planned)
    return min((each for each in planned if each.tokens_per_s >= ALIKE * most), key=lambda each: each.idle)


def plan_split(question: Question, split: Split, part: float, steps: int) -> PlannedSplit:
    """Simulates a part of a job on the same part of the devices."""
    settings, device, model = question.settings, question.device, question.model
    rank = plan_rank(model, split.trainer, device.memory, question.shard)
    taken = sum(each.size for each in rank.parts if not each.is_transient) if split.is_together else 0.0
    running = cache_room(model, question.tp, device, taken) / question.rollout_tokens
    engine = engine_speed(model, device, question.tp, int(running))
    trainer = trainer_speed(model, device, split.trainer, question.devices, settings, question.step_tokens)
    limits = replace(JobLimits.from_settings(settings), mode=split.mode)
    cluster = Cluster(split.servers, engine, trainer, host_workers=max(1, WorkerSettings.read(settings).workers))
    if part < 1:
        part = max(1, round(split.servers * part)) / split.servers
        limits, cluster = limits.shrink(part), cluster.shrink(part)
    warmup = STEPS_AHEAD.get(split.mode, limits.max_staleness + 1)
    simulation = simulate(limits, question.workload, cluster, steps=steps, warmup=warmup, seed=question.seed)
    server = plan_server(model, question.tp, device.memory, min(running, simulation.running), question.rollout_tokens)
    return PlannedSplit(split, simulation, part, rank, server, question.devices)


def _search_mode(question: Question, mode: str) -> list[PlannedSplit]:
    part = min(1.0, SEARCHED_ROLLOUTS / (question.settings.prompts * question.settings.n))
    splits = [split for split in _splits(question, mode) if _fits(question, split)]
    tried = splits if len(splits) <= PARTS // 2 else [*splits[::2], *splits[-1:]]
    found = {split: plan_split(question, split, part, SEARCHED_STEPS) for split in tried}
    if found:
        best = find_best(list(found.values())).split
        place = splits.index(best)
        for split in splits[max(0, place - 1) : place + 2]:
            found.setdefault(split, plan_split(question, split, part, SEARCHED_STEPS))
    return sorted(found.values(), key=lambda planned: planned.split.trainer)


def _splits(question: Question, mode: str) -> Iterator[Split]:
    """Splits by the trainer's number of devices; the last one, in synchronous mode, lets all devices take turns."""
    devices, tp = question.devices, question.tp
    unit = lcm(tp, question.shard or 1)
    counts = {ceil(devices * part / PARTS / unit) * unit for part in range(1, PARTS)}
    for trainer in sorted(count for count in counts if count < devices):
        yield Split(mode, trainer, (devices - trainer) // tp)
    if mode == "synchronous" and not devices % unit:
        yield Split(mode, devices, devices // tp, is_together=True)


def _fits(question: Question, split: Split) -> bool:
    rank = plan_rank(question.model, split.trainer, question.device.memory, question.shard)
    taken = sum(part.size for part in rank.parts if not part.is_transient) if split.is_together else 0.0
    return rank.fits and cache_room(question.model, question.tp, question.device, taken) >= question.rollout_tokens


def _does_not_fit(question: Question) -> ConfigError:
    """The error for a model that is too large, with what to change."""
    device = question.device
    if question.shard and question.shard >= question.devices and question.devices % question.shard:
        problem = f"{question.shard} ranks share a copy of the weights, and there are {question.devices} devices"
        return ConfigError(problem, field="distributed.shard", remedy="lower it, or raise --gpus")
    server = plan_server(question.model, question.tp, device.memory, 1, question.rollout_tokens)
    if not server.fits:
        problem = f"a server of {question.tp} {device.name} has no room for the model: {server}"
        return ConfigError(problem, field="--servers-tp", remedy="raise it, or name a device with more memory")
    rank = plan_rank(question.model, question.devices, device.memory, question.shard)
    problem = f"no split of {question.devices} {device.name} fits; of a rank among all of them: {rank}"
    remedy = f"raise --gpus{'; ' + rank.remedy if rank.remedy else ''}"
    return ConfigError(problem, field="--gpus", remedy=remedy)

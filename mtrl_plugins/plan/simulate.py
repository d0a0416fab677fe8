"""Simulates steps of a training run: waiting for rollouts, update, publish, and what everyone did meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from mtrl_plugins.plan.event_queue import EventQueue, Process, Signal
from mtrl_plugins.plan.simulated_modes import SimulatedBatch, make_simulated_source
from mtrl_plugins.plan.simulated_rollouts import SimulatedRollouts
from mtrl_plugins.plan.simulated_server import SimulatedServer
from mtrl_plugins.plan.speeds import Cluster
from mtrl_plugins.plan.workload import JobLimits, Workload

SHARED_SLOWDOWN = 2.0
"""How much longer engine and trainer take while both work on one processor."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, from the publish before it to its own."""

    seconds: float
    waiting_s: float
    """Seconds in which the trainer waited for rollouts, before the update and after it."""
    learning_s: float
    publishing_s: float
    taken_s: float
    """Seconds until the step had its groups."""
    engine_busy_s: float
    """Seconds in which servers generated, of all servers together."""
    sequence_s: float
    """Seconds of all running sequences together."""
    host_s: float
    """Seconds in which the processes that play rollouts worked."""
    written: int
    """Tokens in the groups that the step took."""
    staleness: int
    """Versions, of the oldest token."""
    dropped: int
    replaced: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run."""

    steps: tuple[SimulatedStep, ...]
    servers: int
    started: int
    ended: int
    under_way: int
    """Rollouts that had not ended when the simulation did."""
    most_under_way: int

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(step.seconds for step in self.steps)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def engine_idle(self) -> float:
        """The share of the servers' time in which they generated nothing."""
        return max(0.0, 1 - sum(step.engine_busy_s for step in self.steps) / (self.servers * self.seconds))

    @property
    def trainer_idle(self) -> float:
        """The share of the time in which the trainer waited."""
        return sum(step.waiting_s for step in self.steps) / self.seconds

    @property
    def host_busy(self) -> float:
        """The share of the time in which the processes that play rollouts worked."""
        return sum(step.host_s for step in self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the groups that steps took; what was dropped does not count."""
        return sum(step.written for step in self.steps) / self.seconds

    @property
    def running(self) -> float:
        """The mean number of sequences that run on a busy server."""
        return sum(step.sequence_s for step in self.steps) / max(1e-12, sum(step.engine_busy_s for step in self.steps))

    @property
    def staleness(self) -> int:
        return max(step.staleness for step in self.steps)

    @property
    def dropped(self) -> int:
        return sum(step.dropped for step in self.steps)


def simulate(
    limits: JobLimits, workload: Workload, cluster: Cluster, *, steps: int = 4, warmup: int = 1, seed: int = 0
) -> Simulation:
    """Simulates some steps after those of the warm-up, in which queues fill. The same seed gives the same steps."""
    return _Simulator(limits, workload, cluster, seed).run(min(steps + warmup, limits.steps), warmup)


@contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """The simulation makes many objects and no cycles that matter; looking for some took a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Simulator:
    def __init__(self, limits: JobLimits, workload: Workload, cluster: Cluster, seed: int) -> None:
        self.queue, self.limits, self.cluster = EventQueue(), limits, cluster
        self.rollouts = SimulatedRollouts(self.queue, limits, workload, seed, cluster.host_workers)
        self.servers = [
            SimulatedServer(self.queue, cluster.engine, self.rollouts.finish_turn) for _ in range(cluster.servers)
        ]
        self.rollouts.servers = self.servers
        self.version = 0
        self.update = _Update(self.queue, self._is_engine_busy)
        if cluster.is_shared:
            for server in self.servers:
                server.on_busy = self.update.change_pace
        self.steps: list[SimulatedStep] = []
        self.totals = (0.0, 0.0, 0.0)

    def run(self, steps: int, warmup: int) -> Simulation:
        self.queue.start(self._train(steps))
        with _paused_garbage_collection():
            self.queue.run()
        measured = tuple(self.steps[warmup:] or self.steps)
        rollouts = self.rollouts
        return Simulation(
            measured, len(self.servers), rollouts.started, rollouts.ended, rollouts.running, rollouts.most_running
        )

    def _train(self, steps: int) -> Process:
        queue, source = self.queue, make_simulated_source(self.queue, self.rollouts, self.limits, lambda: self.version)
        for step in range(1, steps + 1):
            started = queue.now
            batch = yield from source.take(step)
            taken = queue.now
            staleness = batch.staleness(self.version)
            yield from self._learn(batch)
            learned = queue.now
            yield from source.wait_until_idle()
            idle = queue.now
            yield from self._publish(step)
            waited = taken - started + idle - learned
            self._record(
                batch, staleness, (queue.now - started, waited, learned - taken, queue.now - idle, taken - started)
            )
            source.on_published()
        queue.stop()

    def _learn(self, batch: SimulatedBatch) -> Process:
        seconds, is_shared = self.cluster.trainer.update_s(batch.tokens), self.cluster.is_shared
        if not is_shared:
            yield seconds
        elif seconds:
            self._set_slowdown(SHARED_SLOWDOWN)
            yield self.update.start(seconds)
            self._set_slowdown(1.0)

    def _set_slowdown(self, slowdown: float) -> None:
        for server in self.servers:
            server.set_slowdown(slowdown)

    def _publish(self, step: int) -> Process:
        """Servers generate nothing while weights arrive."""
        seconds = self.cluster.trainer.publish_s
        for server in self.servers:
            server.stall(seconds)
        yield seconds
        self.version = step
        for server in self.servers:
            server.load(step, read_again=self.limits.reads_again)

    def _is_engine_busy(self) -> bool:
        return any(server.is_busy for server in self.servers)

    def _record(self, batch: SimulatedBatch, staleness: int, times: tuple[float, float, float, float, float]) -> None:
        for server in self.servers:
            server.advance()
        busy_s = sum(server.busy_s for server in self.servers)
        sequence_s = sum(server.sequence_s for server in self.servers)
        before, self.totals = self.totals, (busy_s, sequence_s, self.rollouts.host_s)
        spent = tuple(now - earlier for now, earlier in zip(self.totals, before, strict=True))
        self.steps.append(
            SimulatedStep(
                *times,
                engine_busy_s=spent[0],
                sequence_s=spent[1],
                host_s=spent[2],
                written=batch.written,
                staleness=staleness,
                dropped=batch.dropped,
                replaced=batch.replaced,
            )
        )


class _Update:
    """An update on a processor that it shares with the engine."""

    def __init__(self, queue: EventQueue, is_engine_busy: Callable[[], bool]) -> None:
        self._queue, self._is_engine_busy = queue, is_engine_busy
        self._left, self._pace, self._last, self._ticket = 0.0, 1.0, 0.0, 0
        self._done = Signal()

    def start(self, seconds: float) -> Signal:
        """The signal of its end."""
        self._left, self._last, self._done = seconds, self._queue.now, Signal()
        self._schedule()
        return self._done

    def change_pace(self) -> None:
        """The engine has started or ended to work."""
        if self._left:
            self._advance()
            self._schedule()

    def _advance(self) -> None:
        self._left = max(0.0, self._left - (self._queue.now - self._last) * self._pace)
        self._last = self._queue.now

    def _schedule(self) -> None:
        self._ticket += 1
        self._pace = 1 / SHARED_SLOWDOWN if self._is_engine_busy() else 1.0
        self._queue.at(self._queue.now + self._left / self._pace, self._finish, self._ticket)

    def _finish(self, ticket: int) -> None:
        if ticket == self._ticket:
            self._left = 0.0
            self._queue.notify(self._done)

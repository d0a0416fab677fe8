"""The three modes in a simulation: when groups start, and which of them a step takes, as in `trainer.train.modes`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from mtrl_plugins.plan.event_queue import EventQueue, Process, Signal
from mtrl_plugins.plan.simulated_rollouts import SimulatedGroup, SimulatedRollouts
from mtrl_plugins.plan.workload import JobLimits


@dataclass
class SimulatedBatch:
    """What a step trains on."""

    groups: list[SimulatedGroup] = field(default_factory=list)
    replaced: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the rows with a gradient."""
        return sum(group.tokens for group in self.groups if group.has_signal)

    @property
    def written(self) -> int:
        return sum(group.written for group in self.groups)

    def staleness(self, version: int) -> int:
        """Versions, of the oldest token."""
        return max((_staleness(group, version) for group in self.groups), default=0)


Take = Generator[float | Signal, None, SimulatedBatch]


class SimulatedSource(Protocol):
    """Where a simulated step takes its groups from."""

    def take(self, step: int) -> Take: ...

    def wait_until_idle(self) -> Process: ...

    def on_published(self) -> None: ...


def make_simulated_source(
    queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits, version: Callable[[], int]
) -> SimulatedSource:
    """The source of a mode; `version` returns the version of the servers' weights."""
    match limits.mode:
        case "synchronous":
            return SimulatedSync(queue, rollouts, limits)
        case "one_step_off":
            return SimulatedOneStepOff(queue, rollouts, limits)
        case _:
            return SimulatedAsync(queue, rollouts, limits, version)


class SimulatedSync:
    """Nothing runs outside of `take`."""

    def __init__(self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits) -> None:
        self._queue, self._rollouts, self._limits = queue, rollouts, limits
        self._changed = Signal()
        self._to_start: deque[SimulatedGroup] = deque()
        self._finished: list[SimulatedGroup] = []
        rollouts.next_group = lambda: self._to_start.popleft() if self._to_start else None
        rollouts.on_group = self._on_group

    def take(self, step: int) -> Take:
        return (yield from self.collect())

    def wait_until_idle(self) -> Process:
        yield from ()

    def on_published(self) -> None:
        pass

    def collect(self) -> Take:
        """A step's groups; those without a signal are replaced, up to `draws` times."""
        batch, missing = SimulatedBatch(), self._limits.prompts
        for draw in range(self._limits.draws + 1):
            self._finished = []
            self._to_start.extend(self._rollouts.draw_group() for _ in range(missing))
            self._rollouts.fill()
            while len(self._finished) < missing:
                yield self._changed
            batch.groups += self._finished
            if draw == self._limits.draws:
                break
            kept = [group for group in batch.groups if group.has_signal]
            batch.replaced += len(batch.groups) - len(kept)
            batch.groups, missing = kept, self._limits.prompts - len(kept)
            if not missing:
                break
        return batch

    def _on_group(self, group: SimulatedGroup) -> None:
        self._finished.append(group)
        self._queue.notify(self._changed)


class SimulatedOneStepOff(SimulatedSync):
    """The next step's groups are made during a step."""

    def __init__(self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits) -> None:
        super().__init__(queue, rollouts, limits)
        self._next: SimulatedBatch | None = None
        self._has_started = False
        self._done = Signal()

    def take(self, step: int) -> Take:
        if not self._has_started:
            self._start()
        while (batch := self._next) is None:
            yield self._done
        if step < self._limits.steps:
            self._start()
        return batch

    def wait_until_idle(self) -> Process:
        while self._next is None:
            yield self._done

    def _start(self) -> None:
        self._has_started, self._next = True, None
        self._queue.start(self._collect_next())

    def _collect_next(self) -> Process:
        self._next = yield from self.collect()
        self._queue.notify(self._done)


class SimulatedAsync:
    """Groups start continuously; how many are open is limited to what steps can take before they are too stale."""

    def __init__(
        self, queue: EventQueue, rollouts: SimulatedRollouts, limits: JobLimits, version: Callable[[], int]
    ) -> None:
        self._queue, self._rollouts, self._limits, self._version = queue, rollouts, limits, version
        self._changed = Signal()
        self._finished: list[tuple[int, SimulatedGroup]] = []
        """By number: the oldest is taken first."""
        self._open = self._taken = 0
        rollouts.next_group, rollouts.on_group = self._next_group, self._on_group

    @property
    def _max_open(self) -> int:
        last_step = min(self._version() + self._limits.max_staleness + 1, self._limits.steps)
        return last_step * self._limits.prompts - self._taken

    def take(self, step: int) -> Take:
        """The oldest finished groups; those that are too stale are dropped."""
        self._rollouts.fill()
        batch, prompts = SimulatedBatch(), self._limits.prompts
        while len(batch.groups) < prompts:
            while not self._finished:
                yield self._changed
            group = heappop(self._finished)[1]
            self._open -= 1
            if _staleness(group, self._version()) > self._limits.max_staleness:
                batch.dropped += 1
            elif not group.has_signal and batch.replaced < self._limits.draws * prompts:
                batch.replaced += 1
            else:
                batch.groups.append(group)
                self._taken += 1
            self._rollouts.fill()
        return batch

    def wait_until_idle(self) -> Process:
        yield from ()

    def on_published(self) -> None:
        self._rollouts.fill()

    def _next_group(self) -> SimulatedGroup | None:
        if self._open >= self._max_open:
            return None
        self._open += 1
        return self._rollouts.draw_group()

    def _on_group(self, group: SimulatedGroup) -> None:
        heappush(self._finished, (group.number, group))
        self._queue.notify(self._changed)


def _staleness(group: SimulatedGroup, version: int) -> int:
    return version - (version if group.first_version is None else group.first_version)

"""Sync, one-step-off and async modes: how far rollouts run ahead of training. A step takes its rollouts from here."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

import anyio

from gateway.plural import format_count
from trainer.algorithms.train_batch import has_learning_signal
from trainer.data.curriculum import TaskDraw, TaskStream
from trainer.reward.scorer import ScoredGroup
from trainer.rollout.rollout import Rollout
from trainer.rollout.scheduler import Group
from trainer.rollout.task import Task
from trainer.train.collect import StepCollector, StepRollouts, count_token_ages, group_order
from trainer.train.settings import TrainSettings


class RolloutSource(ABC):
    """Where steps take their rollouts from. Entered and left by the training task."""

    phase: str
    """The trainer's phase while it waits for rollouts."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None

    @abstractmethod
    async def take(self, step: int) -> StepRollouts:
        """The rollouts that the step trains on."""

    async def wait_until_idle(self) -> None:
        """Waits until weights may change. By default not at all: running rollouts continue with the new ones."""
        return

    def on_published(self) -> None:
        """Called after new weights were published."""
        return

    @property
    @abstractmethod
    def pending(self) -> Sequence[StepRollouts]:
        """Rollouts that no step has taken yet."""


class BackgroundTasks(RolloutSource):
    """A source with background tasks that are cancelled when it is left."""

    def __init__(self) -> None:
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished and scored group in the queue."""

    name: str
    scored: ScoredGroup

    def staleness(self, version: int) -> int:
        """The age of its oldest token in versions."""
        return max(count_token_ages((scored.rollout for scored in self.scored.scored), version), default=0)


class AsyncRollouts(BackgroundTasks):
    """Generates groups continuously. The number of open groups (running, or queued and not yet taken) is limited to
    what steps can take before the present weights' tokens become too stale, which bounds the waste."""

    phase = "waiting"

    def __init__(self, collector: StepCollector, task_stream: TaskStream, version: Callable[[], int]) -> None:
        self._collector, self._task_stream, self._version = collector, task_stream, version
        super().__init__()
        self._numbers = count()
        self._draws: dict[str, TaskDraw] = {}
        """The draws of open groups."""
        self._rollouts: defaultdict[str, list[Rollout]] = defaultdict(list)
        """The finished rollouts of open groups."""
        self._queue: list[FinishedGroup] = []
        self._taken = version() * collector.settings.prompts
        """Groups that steps have taken, those before a resume included."""
        self._changed = anyio.Event()
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0

    @property
    def pending(self) -> list[StepRollouts]:
        queued = {group.name: [group.scored] for group in self._queue}
        return [
            StepRollouts(replaced=queued.get(name, []), finished=rollouts) for name, rollouts in self._rollouts.items()
        ]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def take(self, step: int) -> StepRollouts:
        """Takes the oldest finished groups. Groups that are too stale are dropped, and with dynamic sampling, groups
        without a signal are replaced."""
        settings, step_rollouts = self._collector.settings, StepRollouts(step=step)
        max_replaced = settings.algorithm.dynamic_sampling * settings.prompts
        taken: list[FinishedGroup] = []
        while len(taken) < settings.prompts:
            group = await self._next_finished()
            step_rollouts.draws.append(self._draws.pop(group.name))
            step_rollouts.finished += self._rollouts.pop(group.name, [])
            if group.staleness(self._version()) > settings.max_staleness:
                step_rollouts.dropped.append(group.scored)
            elif len(step_rollouts.replaced) < max_replaced and not has_learning_signal(
                group.scored, settings.algorithm
            ):
                step_rollouts.replaced.append(group.scored)
            else:
                taken.append(group)
                self._taken += 1
            self._notify()
        step_rollouts.groups = [
            group.scored
            for group in sorted(taken, key=lambda group: group_order(group.name))
            if group.scored.scored or group.scored.failed
        ]
        self._track_idle_time()
        step_rollouts.waited_s, self._idle_s = self._idle_s, 0.0
        return step_rollouts

    def on_published(self) -> None:
        self._notify()

    async def _next_finished(self) -> FinishedGroup:
        while not self._queue:
            await self._changed.wait()
        oldest = min(self._queue, key=lambda group: group_order(group.name))  # The next to become too stale.
        self._queue.remove(oldest)
        return oldest

    async def _run(self) -> None:
        scheduler = self._collector.make_scheduler(self._keep_rollout)
        async with scheduler.submit_from(self._next_task) as groups, anyio.create_task_group() as scoring:
            async for group in groups:
                scoring.start_soon(self._score, group)

    async def _next_task(self) -> tuple[str, Task]:
        """The name and task of the next group, as soon as one may be opened."""
        while len(self._draws) >= self._max_open:
            await self._changed.wait()
        draw, name = self._task_stream.draw(), f"0-{self._version()}-{next(self._numbers)}"
        self._draws[name] = draw
        self._track_idle_time()
        return name, draw.task

    @property
    def _max_open(self) -> int:
        """How many groups may be open."""
        settings = self._collector.settings
        last_step = min(self._version() + settings.max_staleness + 1, settings.steps)
        return last_step * settings.prompts - self._taken

    async def _keep_rollout(self, rollout: Rollout) -> None:
        self._rollouts[rollout.group].append(rollout)

    async def _score(self, group: Group) -> None:
        """Scores and queues a group. A group that lost all its rollouts is queued too, and its step has fewer."""
        scored = ScoredGroup(group.task, ())
        if group.rollouts:
            scored = await self._collector.scorer.score(group.task, group.rollouts)
        self._queue.append(FinishedGroup(group.name, scored))
        self._track_idle_time()
        self._notify()

    def _track_idle_time(self) -> None:
        """Measures the time in which no rollout runs because training is behind."""
        now, is_idle = time.monotonic(), len(self._draws) == len(self._queue)
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
        self._idle_since = now if is_idle else None

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def make_rollout_source(collector: StepCollector, task_stream: TaskStream, version: Callable[[], int]) -> RolloutSource:
    """Makes the source for the configured mode; `version` returns the version of the present weights."""
    if collector.settings.sft is not None:
        from trainer.train.trace_source import TraceSource

        return TraceSource(collector, task_stream)
    match collector.settings.mode:
        case "synchronous":
            return SyncRollouts(collector, task_stream)
        case "one_step_off":
            return OneStepOffRollouts(collector, task_stream)
        case "asynchronous":
            return AsyncRollouts(collector, task_stream, version)


def describe_mode(settings: TrainSettings) -> str:
    """The mode in words, for the operator."""
    if settings.sft is not None:
        return f"supervised: each step learns {settings.prompts} traces"
    match settings.mode:
        case "synchronous":
            return "synchronous: rollouts and training take turns, and every token is sampled by the newest weights"
        case "one_step_off":
            return "one step off: a step's rollouts are made during the previous step, one version behind"
        case "asynchronous":
            versions = settings.max_staleness
            groups = (versions + 1) * settings.prompts
            return (
                f"asynchronous: a step trains on tokens that are at most {format_count(versions, 'version')} old;"
                f" older ones are dropped and counted; at most {groups} groups are open at once"
            )


class SyncRollouts(RolloutSource):
    """Rollouts and training take turns: nothing runs outside of `take`."""

    phase = "rolling_out"
    pending: Sequence[StepRollouts] = ()

    def __init__(self, collector: StepCollector, task_stream: TaskStream) -> None:
        self._collector, self._task_stream = collector, task_stream

    async def take(self, step: int) -> StepRollouts:
        self.pending = (rollouts := StepRollouts(),)
        await self._collector.collect(step, self._task_stream, rollouts)
        self.pending = ()
        return rollouts


class OneStepOffRollouts(BackgroundTasks):
    """Makes the next step's rollouts during a step, all of them with the weights before it."""

    phase = "waiting"

    def __init__(self, collector: StepCollector, task_stream: TaskStream) -> None:
        super().__init__()
        self._collector, self._task_stream = collector, task_stream
        self._next: StepRollouts | None = None
        self._done = anyio.Event()
        self._done_at = 0.0

    @property
    def pending(self) -> list[StepRollouts]:
        return [self._next] if self._next else []

    async def take(self, step: int) -> StepRollouts:
        if self._next:
            self._next.waited_s = time.monotonic() - self._done_at
        rollouts = self._next or self._start(step)
        await self._done.wait()
        self._next = None
        if step < self._collector.settings.steps:
            self._start(step + 1)
        return rollouts

    async def wait_until_idle(self) -> None:
        await self._done.wait()

    def _start(self, step: int) -> StepRollouts:
        self._next, self._done = rollouts, done = StepRollouts(), anyio.Event()
        self._tasks.start_soon(self._collect, step, rollouts, done)
        return rollouts

    async def _collect(self, step: int, into: StepRollouts, done: anyio.Event) -> None:
        await self._collector.collect(step, self._task_stream, into)
        self._done_at = time.monotonic()
        done.set()

"""Sync, one-step-off and async modes: how far rollouts run ahead of training. A step takes its rollouts from here."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import anyio

from trainer.data.curriculum import TaskStream
from trainer.train.async_queue import AsyncRollouts, BackgroundTasks
from trainer.train.collect import StepCollector, StepRollouts
from trainer.train.settings import TrainSettings


class RolloutSource(Protocol):
    """Where steps take their rollouts from. Entered and left by the training task."""

    phase: str
    """The trainer's phase while it waits for rollouts."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    async def take(self, step: int) -> StepRollouts:
        """The rollouts that the step trains on."""
        ...

    async def wait_until_idle(self) -> None:
        """Waits until weights may change."""
        ...

    def on_published(self) -> None:
        """Called after new weights were published."""
        ...

    @property
    def pending(self) -> list[StepRollouts]:
        """Rollouts that no step has taken yet."""
        ...


def make_rollout_source(collector: StepCollector, task_stream: TaskStream, version: Callable[[], int]) -> RolloutSource:
    """Makes the source for the configured mode; `version` returns the version of the present weights."""
    match collector.settings.mode:
        case "synchronous":
            return SyncRollouts(collector, task_stream)
        case "one_step_off":
            return OneStepOffRollouts(collector, task_stream)
        case "asynchronous":
            return AsyncRollouts(collector, task_stream, version)


def describe_mode(settings: TrainSettings) -> str:
    """The mode in words, for the operator."""
    match settings.mode:
        case "synchronous":
            return "synchronous: rollouts and training take turns, and every token is sampled by the newest weights"
        case "one_step_off":
            return "one step off: a step's rollouts are made during the previous step, one version behind"
        case "asynchronous":
            versions = settings.max_staleness
            groups = (versions + 1) * settings.prompts
            return (
                f"asynchronous: a step trains on tokens that are at most {versions} version{'s'[: versions > 1]} old;"
                f" older ones are dropped and counted; at most {groups} groups are open at once"
            )


class SyncRollouts:
    """Rollouts and training take turns: nothing runs outside of `take`."""

    phase = "rolling_out"

    def __init__(self, collector: StepCollector, task_stream: TaskStream) -> None:
        self._collector, self._task_stream = collector, task_stream
        self.pending: list[StepRollouts] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def take(self, step: int) -> StepRollouts:
        self.pending = [rollouts := StepRollouts()]
        await self._collector.collect(step, self._task_stream, rollouts)
        self.pending = []
        return rollouts

    async def wait_until_idle(self) -> None:
        pass

    def on_published(self) -> None:
        pass


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

    def on_published(self) -> None:
        """Does nothing: the next rollouts start when a step takes the present ones."""

    def _start(self, step: int) -> StepRollouts:
        self._next, self._done = rollouts, done = StepRollouts(), anyio.Event()
        self._tasks.start_soon(self._collect, step, rollouts, done)
        return rollouts

    async def _collect(self, step: int, into: StepRollouts, done: anyio.Event) -> None:
        await self._collector.collect(step, self._task_stream, into)
        self._done_at = time.monotonic()
        done.set()

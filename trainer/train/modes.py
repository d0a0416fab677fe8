"""How far rolling out runs ahead of learning is chosen once: a step asks for its rollouts, and is given them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import anyio

from trainer.data.curriculum import Course
from trainer.train.beside import Beside
from trainer.train.flow import Flow
from trainer.train.rolling import Rolled, Roller
from trainer.train.settings import TrainSettings


class Rolling(Protocol):
    """Entered and left by the task that learns."""

    phase: str
    """What the trainer is in while it asks."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    async def take(self, step: int) -> Rolled:
        """What the step learns from."""
        ...

    async def rest(self) -> None:
        """Waits until weights may change."""
        ...

    def published(self) -> None:
        """Weights have changed."""
        ...

    @property
    def untaken(self) -> list[Rolled]:
        """What no step was given."""
        ...


def rolling_of(roller: Roller, course: Course, version: Callable[[], int]) -> Rolling:
    """`version` tells the weights that there are."""
    match roller.settings.mode:
        case "synchronous":
            return InStep(roller, course)
        case "one_step_off":
            return Ahead(roller, course)
        case "asynchronous":
            return Flow(roller, course, version)


def told(settings: TrainSettings) -> str:
    """For whoever is about to begin."""
    match settings.mode:
        case "synchronous":
            return "synchronous: rollouts and learning take turns, and every token is of the newest weights"
        case "one_step_off":
            return "one step off: a step's rollouts are made while the one before it learns, one version behind"
        case "asynchronous":
            most = settings.max_staleness
            groups = (most + 1) * settings.prompts
            return (
                f"asynchronous: a step learns from tokens that are at most {most} version{'s'[: most > 1]} old; what is"
                f" older is dropped and counted; at most {groups} groups are open at once"
            )


class InStep:
    """Rollouts and learning take turns."""

    phase = "rolling_out"

    def __init__(self, roller: Roller, course: Course) -> None:
        self._roller, self._course = roller, course
        self.untaken: list[Rolled] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is under way but within `take`."""

    async def take(self, step: int) -> Rolled:
        self.untaken = [rolled := Rolled()]
        await self._roller.step(step, self._course, rolled)
        self.untaken = []
        return rolled

    async def rest(self) -> None:
        """Nothing is under way."""

    def published(self) -> None:
        """Nothing is under way."""


class Ahead(Beside):
    """While a step learns, the next one's rollouts are made, all of them with the weights before its own."""

    phase = "waiting"

    def __init__(self, roller: Roller, course: Course) -> None:
        super().__init__()
        self._roller, self._course = roller, course
        self._next: Rolled | None = None
        self._done = anyio.Event()
        self._done_at = 0.0

    @property
    def untaken(self) -> list[Rolled]:
        return [self._next] if self._next else []

    async def take(self, step: int) -> Rolled:
        if self._next:
            self._next.waited_s = time.monotonic() - self._done_at
        taken = self._next or self._begin(step)
        await self._done.wait()
        self._next = None
        if step < self._roller.settings.steps:
            self._begin(step + 1)
        return taken

    async def rest(self) -> None:
        await self._done.wait()

    def published(self) -> None:
        """The next step begins with them."""

    def _begin(self, step: int) -> Rolled:
        self._next, self._done = rolled, done = Rolled(), anyio.Event()
        self._tasks.start_soon(self._roll, step, rolled, done)
        return rolled

    async def _roll(self, step: int, into: Rolled, done: anyio.Event) -> None:
        await self._roller.step(step, self._course, into)
        self._done_at = time.monotonic()
        done.set()

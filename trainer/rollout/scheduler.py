"""Runs many rollouts at once in groups: each group is done with its last rollout, and no group waits for another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from gateway.types import EMPTY
from trainer.rollout.admission import Admission, AdmissionSlot
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import find_failed_tools
from trainer.rollout.task import Task

GroupStatus = Literal["whole", "short", "dropped"]
"""All rollouts count, some are missing, or none counts."""
RolloutSink = Callable[[Rollout], Awaitable[None]]
NextTask = Callable[[], Awaitable[tuple[str, Task] | None]]
"""Waits for the next group's name and task; None at the end."""


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with each other."""

    task: Task
    rollouts: tuple[Rollout, ...]
    """The rollouts that count."""
    failed: tuple[Rollout, ...] = ()
    """All rollouts that infrastructure ended, including those that were repeated."""
    missing: int = 0
    """Rollouts that failed and were not replaced."""
    dropped: bool = False
    """True if none of its rollouts counts."""
    name: str = ""

    @property
    def status(self) -> GroupStatus:
        return "dropped" if self.dropped else "short" if self.missing else "whole"


@dataclass
class _RunningGroup:
    """A group under way."""

    task: Task
    name: str
    done: dict[int, Rollout] = field(default_factory=dict)
    failed: list[Rollout] = field(default_factory=list)

    def finish(self) -> Group:
        """The group without its failed rollouts."""
        rollouts = tuple(self.done[index] for index in sorted(self.done) if not self.done[index].stop.is_infrastructure)
        missing = len(self.done) - len(rollouts)
        return Group(self.task, rollouts, tuple(self.failed), missing, dropped=not rollouts, name=self.name)


class Scheduler:
    """Runs `count` rollouts of each task, and yields groups as they finish."""

    def __init__(
        self,
        runner: RolloutRunner,
        count: int,
        *,
        admission: Admission | None = None,
        max_retries: int = 2,
        sink: RolloutSink | None = None,
    ) -> None:
        """`sink` gets every finished rollout, failed ones included, before its group is yielded."""
        self.runner, self.count, self.max_retries, self.sink = runner, count, max_retries, sink
        self._admission = admission or Admission()

    @asynccontextmanager
    async def submit(self, tasks: Iterable[Task], name: str = "") -> AsyncIterator[AsyncIterator[Group]]:
        """Runs a group for each task, named `name` and a number, which determine its seeds. Leaving the block cancels
        the rollouts under way."""
        named_tasks = ((f"{name}{number}", task) for number, task in enumerate(tasks))

        async def next_task() -> tuple[str, Task] | None:
            return next(named_tasks, None)

        async with self.submit_from(next_task) as groups:
            yield groups

    @asynccontextmanager
    async def submit_from(self, next_task: NextTask) -> AsyncIterator[AsyncIterator[Group]]:
        """Like `submit`, with tasks requested one by one."""
        send, receive = anyio.create_memory_object_stream[Group](0)
        async with anyio.create_task_group() as running, receive:
            running.start_soon(self._start_all, next_task, send, running)
            yield receive
            running.cancel_scope.cancel()

    async def _start_all(self, next_task: NextTask, send: MemoryObjectSendStream[Group], running: TaskGroup) -> None:
        """Starts rollouts in order, a group's together, as admission allows."""
        async with send:
            while (named_task := await next_task()) is not None:
                name, task = named_task
                group = _RunningGroup(task, name)
                for index in range(self.count):
                    slot = await self._admission.acquire()
                    running.start_soon(self._run_in_slot, group, index, slot, send.clone())

    async def _run_in_slot(
        self, group: _RunningGroup, index: int, slot: AdmissionSlot, send: MemoryObjectSendStream[Group]
    ) -> None:
        """Runs a rollout; a finished group keeps the slot until it is received, so that results do not pile up."""
        async with send:
            try:
                group.done[index] = await self._run(group, index, slot)
                if len(group.done) == self.count:
                    await send.send(group.finish())
            finally:
                slot.release()

    async def _run(self, group: _RunningGroup, index: int, slot: AdmissionSlot) -> Rollout:
        """Runs a rollout, and repeats it while infrastructure fails it, so often as is allowed.

        A rollout that a tool failed is replaced by one that called this tool as well: otherwise those that do without
        it would take the places of those that use it, and the policy would learn to avoid it.
        """
        failed_tools: set[str] = set()
        for attempt in range(self.max_retries + 1):
            rollout = await self.runner.run(group.task, group=group.name, index=index, attempt=attempt, slot=slot)
            if failed_tools and not failed_tools & {call.name for turn in rollout.turns for call in turn.calls}:
                rollout = _set_aside(rollout, failed_tools)
            if self.sink is not None:
                await self.sink(rollout)
            if not rollout.stop.is_infrastructure:
                break
            group.failed.append(rollout)
            failed_tools.update(find_failed_tools(rollout))
        return rollout


def _set_aside(rollout: Rollout, tools: set[str]) -> Rollout:
    """A rollout that is not scored, since it did without the tools that failed the one in whose place it was run."""
    if rollout.stop.is_infrastructure:
        return rollout
    names = " and ".join(f"`{name}`" for name in sorted(tools))
    reason = f"it did without {names}, whose failure ended the rollout that it should replace"
    return replace(rollout, stop=StopReason.CANCELLED, reason=reason, rewards=EMPTY)

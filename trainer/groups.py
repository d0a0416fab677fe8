"""Many rollouts at once, each at its own pace: a group is done when its last rollout is, and none waits for another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream

from trainer.config import Admission, GroupRules
from trainer.play import Player
from trainer.room import Room, Stay
from trainer.run.rollout import Rollout
from trainer.task import Task

Fate = Literal["whole", "short", "dropped"]
"""What the rules made of a group."""
Keep = Callable[[Rollout], Awaitable[None]]
Asks = Callable[[], Awaitable[tuple[str, Task] | None]]
"""The next group's name and its task, once it may begin; None where there is none."""


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with each other."""

    task: Task
    rollouts: tuple[Rollout, ...]
    """Those that count."""
    failed: tuple[Rollout, ...] = ()
    """Those that infrastructure ended, whatever became of the group."""
    lost: int = 0
    """Rollouts that it has to do without."""
    dropped: bool = False
    """Nothing of it counts."""
    name: str = ""

    @property
    def fate(self) -> Fate:
        return "dropped" if self.dropped else "short" if self.lost else "whole"


@dataclass
class _Open:
    """A group that is under way."""

    task: Task
    name: str
    done: dict[int, Rollout] = field(default_factory=dict)
    failed: list[Rollout] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)

    def judged(self, rules: GroupRules) -> Group:
        counted = tuple(self.done[index] for index in sorted(self.done) if not self.done[index].stop.infrastructure)
        lost = len(self.done) - len(counted)
        if lost and rules.on_failure == "drop":
            counted = ()
        return Group(self.task, counted, tuple(self.failed), lost, dropped=not counted, name=self.name)


class Groups:
    """Plays `count` rollouts of each task; groups come out as they are done."""

    def __init__(
        self,
        player: Player,
        count: int,
        *,
        admission: Admission = Admission(),  # noqa: B008 - frozen
        rules: GroupRules = GroupRules(),  # noqa: B008 - frozen
        keep: Keep | None = None,
    ) -> None:
        """`keep` is given every rollout that is over, those that do not count included, before its group is."""
        self.player, self.count, self.rules, self.keep = player, count, rules, keep
        self._room = Room(admission)

    @asynccontextmanager
    async def play(self, tasks: Iterable[Task], name: str = "") -> AsyncIterator[AsyncIterator[Group]]:
        """Groups are called `name` and a number; seeds go by that. Leaving the block cancels what is under way."""
        named = ((f"{name}{number}", task) for number, task in enumerate(tasks))

        async def following() -> tuple[str, Task] | None:
            return next(named, None)

        async with self.flow(following) as groups:
            yield groups

    @asynccontextmanager
    async def flow(self, following: Asks) -> AsyncIterator[AsyncIterator[Group]]:
        """The same of groups that are asked for one by one."""
        send, receive = anyio.create_memory_object_stream[Group](0)
        async with anyio.create_task_group() as running, receive:
            running.start_soon(self._feed, following, send, running)
            yield receive
            running.cancel_scope.cancel()

    async def _feed(self, following: Asks, send: MemoryObjectSendStream[Group], running: TaskGroup) -> None:
        """Begins rollouts in order, a group's together, as far as there is room."""
        async with send:
            while (asked := await following()) is not None:
                name, task = asked
                group = _Open(task, name)
                for index in range(self.count):
                    await self._begin(group, index, send, running)

    async def _begin(self, group: _Open, index: int, send: MemoryObjectSendStream[Group], running: TaskGroup) -> None:
        stay = await self._room.enter()
        running.start_soon(self._play, group, index, stay, send.clone())

    async def _play(self, group: _Open, index: int, stay: Stay, send: MemoryObjectSendStream[Group]) -> None:
        """A group that nobody takes keeps a place, so that what is done does not pile up."""
        async with send:
            try:
                group.done[index] = await self._played(group, index, stay)
                if len(group.done) == self.count:
                    await send.send(group.judged(self.rules))
            finally:
                stay.leave()

    async def _played(self, group: _Open, index: int, stay: Stay) -> Rollout:
        """Made anew as long as infrastructure fails it and the rules allow."""
        refills = self.rules.refills if self.rules.on_failure == "refill" else 0
        for attempt in range(refills + 1):
            rollout = await self.player.play(group.task, group=group.name, index=index, attempt=attempt, place=stay)
            if self.keep is not None:
                await self.keep(rollout)
            if not rollout.stop.infrastructure:
                break
            group.failed.append(rollout)
        return rollout

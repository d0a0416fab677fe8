"""Rollouts flow while weights change: a step takes the oldest groups that are over, and nothing that is too stale."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Self

import anyio

from trainer.data.curriculum import Course, Draw
from trainer.groups import Group, Groups
from trainer.learn.lesson import teaches
from trainer.reward.scored import ScoredGroup
from trainer.run.rollout import Rollout
from trainer.task import Task
from trainer.train.beside import Beside
from trainer.train.rolling import Rolled, Roller, ages_of, place


@dataclass(frozen=True, slots=True)
class Over:
    """A group that is over."""

    name: str
    scored: ScoredGroup

    def age(self, version: int) -> int:
        """Of its oldest token."""
        return max(ages_of((one.rollout for one in self.scored.scored), version), default=0)


class Flow(Beside):
    """At most as many groups are open, under way or over and not yet taken, as the steps take that may still learn from
    what the present weights write. So waste is bounded, and there is none as long as groups are over about as soon as
    those that were begun with them."""

    phase = "waiting"

    def __init__(self, roller: Roller, course: Course, version: Callable[[], int]) -> None:
        self._roller, self._course, self._version = roller, course, version
        super().__init__()
        self._numbers = count()
        self._draws: dict[str, Draw] = {}
        """Of each group that is open."""
        self._kept: defaultdict[str, list[Rollout]] = defaultdict(list)
        """Of each, the rollouts that are over."""
        self._over: list[Over] = []
        self._taken = version() * roller.settings.prompts
        """Groups that steps were given, those of earlier starts included."""
        self._changed = anyio.Event()
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0

    @property
    def untaken(self) -> list[Rolled]:
        scored = {one.name: [one.scored] for one in self._over}
        return [Rolled(left=scored.get(name, []), over=kept) for name, kept in self._kept.items()]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def take(self, step: int) -> Rolled:
        """Groups that are too stale, or teach nothing where that is asked for, are left out, and others come."""
        settings, into = self._roller.settings, Rolled(step=step)
        replaceable = settings.draws * settings.prompts if settings.algorithm.dynamic else 0
        taken: list[Over] = []
        while len(taken) < settings.prompts:
            one = await self._next_over()
            into.draws.append(self._draws.pop(one.name))
            into.over += self._kept.pop(one.name, [])
            if one.age(self._version()) > settings.max_staleness:
                into.dropped.append(one.scored)
            elif len(into.left) < replaceable and not teaches(one.scored, settings.algorithm):
                into.left.append(one.scored)
            else:
                taken.append(one)
                self._taken += 1
            self._tell()
        into.groups = [
            one.scored
            for one in sorted(taken, key=lambda one: place(one.name))
            if one.scored.scored or one.scored.failed
        ]
        self._account()
        into.waited_s, self._idle_s = self._idle_s, 0.0
        return into

    async def rest(self) -> None:
        """What is under way goes on under the new weights."""

    def published(self) -> None:
        self._tell()

    async def _next_over(self) -> Over:
        while not self._over:
            await self._changed.wait()
        first = min(self._over, key=lambda one: place(one.name))  # The oldest is the next to be too old.
        self._over.remove(first)
        return first

    async def _run(self) -> None:
        roller, settings = self._roller, self._roller.settings
        rules, admission = settings.groups, settings.admission
        groups = Groups(roller.player, settings.n, admission=admission, rules=rules, keep=self._keep)
        async with groups.flow(self._following) as playing, anyio.create_task_group() as scoring:
            async for group in playing:
                scoring.start_soon(self._score, group)

    async def _following(self) -> tuple[str, Task]:
        """The next group, as soon as a step could have it in time."""
        while len(self._draws) >= self._most:
            await self._changed.wait()
        draw, name = self._course.draw(), f"0-{self._version()}-{next(self._numbers)}"
        self._draws[name] = draw
        self._account()
        return name, draw.task

    @property
    def _most(self) -> int:
        """Groups that may be open."""
        settings = self._roller.settings
        last = min(self._version() + settings.max_staleness + 1, settings.steps)
        return last * settings.prompts - self._taken

    async def _keep(self, rollout: Rollout) -> None:
        self._kept[rollout.group].append(rollout)

    async def _score(self, group: Group) -> None:
        """One that has lost all its rollouts is over as well: a step goes on with fewer."""
        scored = ScoredGroup(group.task, ())
        if group.rollouts:
            scored = await self._roller.scorer.score(group.task, group.rollouts)
        self._over.append(Over(group.name, scored))
        self._account()
        self._tell()

    def _account(self) -> None:
        """The time in which nothing is under way, since steps are behind."""
        now, idle = time.monotonic(), len(self._draws) == len(self._over)
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
        self._idle_since = now if idle else None

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

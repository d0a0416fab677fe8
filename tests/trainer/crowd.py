"""Many rollouts on a scripted policy, and tools that answer when the test lets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from gateway.gateway import Gateway
from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES, by_task, calling, gateway_of
from trainer.config import Admission, GroupRules
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.groups import Group, Groups
from trainer.play import Player
from trainer.run.rollout import Rollout
from trainer.task import Task
from trainer.view.counts import Counts


class Doors:
    """Tools that answer when the test lets them."""

    def __init__(self) -> None:
        self.opened: dict[str, anyio.Event] = {}
        self.inside: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()

    def door(self, name: str) -> anyio.Event:
        return self.opened.setdefault(name, anyio.Event())

    async def knock(self, name: str) -> str:
        """Waits until the door is opened."""
        self.inside[name] += 1
        try:
            await self.door(name).wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled[name] += 1
            raise
        finally:
            self.inside[name] -= 1
        return "come in"


def knocks(name: str) -> tuple[str, str]:
    return calling(("knock", {"name": name})), "done"


class House:
    """A player, what it stands on, and what the test wants to know of it."""

    def __init__(self, script: Script, gateway: Gateway, **more: Any) -> None:
        self.engine = ScriptedEngine(script)
        self.gateway, self.counts = gateway, Counts()
        self.player = Player(self.engine, template_for(HERMES), gateway, watch=self.counts, **more)
        self.kept: list[Rollout] = []

    async def keep(self, rollout: Rollout) -> None:
        self.kept.append(rollout)

    def groups(self, count: int, *, rules: GroupRules | None = None, **admission: Any) -> Groups:
        room = Admission(**admission)
        return Groups(self.player, count, admission=room, rules=rules or GroupRules(), keep=self.keep)

    async def all(self, some: Iterable[Task], count: int, **more: Any) -> list[Group]:
        async with self.groups(count, **more).play(some) as done:
            return [group async for group in done]

    @property
    def keys(self) -> list[str]:
        return [asked.key for asked in self.engine.asked]


@asynccontextmanager
async def house(
    said: dict[str, tuple[str, ...]] | Script, *tools: Callable[..., Any], **more: Any
) -> AsyncIterator[House]:
    with anyio.fail_after(30):
        async with gateway_of(*tools) as gateway:
            yield House(said if callable(said) else by_task(said), gateway, **more)
            assert not gateway.sessions

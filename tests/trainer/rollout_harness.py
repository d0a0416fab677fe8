"""A harness for many rollouts at once: a scripted policy, and a tool that answers when the test releases it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from gateway.gateway import Gateway
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, make_gateway, render_calls, script_by_task
from trainer.engine.scripted import Script, ScriptedEngine
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.scheduler import Group, Scheduler
from trainer.rollout.settings import ConcurrencySettings
from trainer.rollout.task import Task
from trainer.view.counters import RolloutCounters


class BlockingTool:
    """A tool, `block`, whose calls wait until the test sets the event of the name they give."""

    def __init__(self) -> None:
        self.events: dict[str, anyio.Event] = {}
        self.waiting: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()

    def event(self, name: str) -> anyio.Event:
        return self.events.setdefault(name, anyio.Event())

    async def block(self, name: str) -> str:
        """Waits until it is released."""
        self.waiting[name] += 1
        try:
            await self.event(name).wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled[name] += 1
            raise
        finally:
            self.waiting[name] -= 1
        return "released"


def blocking_turns(name: str) -> tuple[str, str]:
    """A policy's turns: a call that blocks, and an answer."""
    return render_calls(("block", {"name": name})), "done"


class RolloutHarness:
    """A runner with its engine and gateway, and a record of all finished rollouts."""

    def __init__(self, script: Script, gateway: Gateway, **settings: Any) -> None:
        self.engine = ScriptedEngine(script)
        self.gateway, self.counts = gateway, RolloutCounters()
        self.runner = RolloutRunner(self.engine, make_template(HERMES), gateway, observer=self.counts, **settings)
        self.finished: list[Rollout] = []

    async def record(self, rollout: Rollout) -> None:
        self.finished.append(rollout)

    def make_scheduler(
        self,
        count: int,
        *,
        max_retries: int = 2,
        patience_s: float | None = None,
        waiting: int | None = None,
        **concurrency: int,
    ) -> Scheduler:
        admission = Admission(ConcurrencySettings(**concurrency), patience_s=patience_s, waiting=waiting)
        return Scheduler(self.runner, count, admission=admission, max_retries=max_retries, sink=self.record)

    async def run_all(self, tasks: Iterable[Task], count: int, **settings: Any) -> list[Group]:
        async with self.make_scheduler(count, **settings).submit(tasks) as groups:
            return [group async for group in groups]

    @property
    def request_keys(self) -> list[str]:
        return [request.key for request in self.engine.requests]


@asynccontextmanager
async def open_harness(
    texts: dict[str, tuple[str, ...]] | Script, *tools: Callable[..., Any], **settings: Any
) -> AsyncIterator[RolloutHarness]:
    """A harness whose policy writes these texts, by task; checks that all sessions are closed in the end."""
    with anyio.fail_after(60):
        async with make_gateway(*tools) as gateway:
            yield RolloutHarness(texts if callable(texts) else script_by_task(texts), gateway, **settings)
            assert not gateway.sessions

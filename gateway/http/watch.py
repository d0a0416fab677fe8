"""Whoever hangs up ends what they asked for; a call that ends within a moment is over before anybody need look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.types import Receive

from gateway.http.asked import Gone

T = TypeVar("T")

MOMENT_S = 0.05
"""Looking costs a task, which is more than most calls do. Work is looked after from its second moment on."""


class Watch:
    """Looks after the callers of long work, while `run` does."""

    def __init__(self) -> None:
        self._young: set[_Caller] = set()
        self._old: set[_Caller] = set()
        self._news = anyio.Event()
        self.over = anyio.Event()
        """Set when the server stops: answers without an end then end."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                await self._news.wait()
                await anyio.sleep(MOMENT_S)
                for caller in self._old:
                    tasks.start_soon(caller.stay, caller.staying())
                self._old, self._young = self._young, set()
                if not self._old:
                    self._news = anyio.Event()

    async def attend(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """The work's value; hanging up cancels the work."""
        with anyio.CancelScope() as scope:
            caller = _Caller(receive, scope)
            self._young.add(caller)
            self._news.set()
            try:
                return await work()
            finally:
                self._young.discard(caller)
                self._old.discard(caller)
                caller.leave()
        raise Gone


class _Caller:
    __slots__ = ("_receive", "_stay", "_work")

    def __init__(self, receive: Receive, work: anyio.CancelScope) -> None:
        self._receive, self._work = receive, work
        self._stay: anyio.CancelScope | None = None

    def staying(self) -> anyio.CancelScope:
        """The scope of `stay`, made before it begins, so that the work may end in between."""
        self._stay = anyio.CancelScope()
        return self._stay

    async def stay(self, scope: anyio.CancelScope) -> None:
        with scope:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._work.cancel()

    def leave(self) -> None:
        if self._stay is not None:
            self._stay.cancel()

"""One connection for all, or one for each: a leased connection is never lent a second time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from gateway.config.models import Server
from gateway.types import Outcome
from gateway.upstream.connection import Connection
from gateway.upstream.fault import UpstreamError

LONGEST_WAIT_S = 600.0
_MARGIN_S = 0.05
"""Before the caller's own deadline, so that it hears the reason instead of its own clock."""


def unavailable(reason: str) -> UpstreamError:
    return UpstreamError(Outcome.UNAVAILABLE, reason)


def patience_s() -> float:
    """How long the caller can be kept waiting and still be told why."""
    left_s = anyio.current_effective_deadline() - anyio.current_time()
    return min(LONGEST_WAIT_S, max(0.0, left_s - min(_MARGIN_S, left_s / 10)))


class Supply(Protocol):
    """Where sessions take their connections from."""

    async def connect(self) -> Connection:
        """A new connection, to learn what the server offers; it may still fail."""
        ...

    async def keep(self, connection: Connection) -> None:
        """Puts a proven connection to use; returns when the server needs another one."""
        ...

    async def take(self) -> Connection: ...

    async def borrow(self) -> Connection:
        """For one request that belongs to no session."""
        ...

    def give_back(self, connection: Connection) -> None: ...

    @property
    def connections(self) -> tuple[Connection, ...]: ...


class Shared:
    """One connection for all sessions."""

    def __init__(self, begin: Callable[[], Connection], why_not: Callable[[], str | None]) -> None:
        self._begin, self._why_not = begin, why_not
        self._current: Connection | None = None
        self._news = anyio.Event()

    @property
    def connections(self) -> tuple[Connection, ...]:
        return () if self._current is None else (self._current,)

    async def connect(self) -> Connection:
        return self._begin()

    async def keep(self, connection: Connection) -> None:
        self._current = connection
        self.wake()
        await connection.until_leaving()
        self._current = None

    def wake(self) -> None:
        """Those who wait look again."""
        news, self._news = self._news, anyio.Event()
        news.set()

    async def take(self) -> Connection:
        """While the server is being reached for, its callers wait; once it is known to be down, they need not."""
        if self._current is not None and self._current.usable:
            return self._current
        with anyio.move_on_after(patience_s()):
            while self._current is None or not self._current.usable:
                if (reason := self._why_not()) is not None:
                    raise unavailable(reason)
                await self._news.wait()
            return self._current
        raise unavailable("the server is still being connected to")

    async def borrow(self) -> Connection:
        return await self.take()

    def give_back(self, connection: Connection) -> None:
        """It stays everybody's."""


class Leased:
    """A connection for each session, at most so many, some of them opened ahead."""

    def __init__(self, begin: Callable[[], Connection], config: Server, tasks: TaskGroup) -> None:
        self._begin, self._config, self._tasks = begin, config, tasks
        self._ready: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._waiting = self._coming = self._failures = 0
        self._failure = ""
        self._news = anyio.Condition()
        self._trouble = anyio.Event()

    @property
    def connections(self) -> tuple[Connection, ...]:
        return tuple(self._all)

    async def connect(self) -> Connection:
        async with self._news:
            while len(self._all) >= self._config.most:
                await self._news.wait()
            return self._new()

    async def keep(self, connection: Connection) -> None:
        self._trouble = anyio.Event()
        await self._offer(connection)
        self._grow()
        await self._trouble.wait()

    async def take(self) -> Connection:
        wait_s = patience_s()
        self._waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                return await self._next()
        finally:
            self._waiting -= 1
            self._grow()
        if self._coming:
            raise unavailable("the server is still being connected to")
        raise unavailable(f"all {self._config.most} connections (`most`) were in use for {wait_s:.1f} s")

    async def borrow(self) -> Connection:
        for connection in (*self._ready, *self._all):
            if connection.usable:
                return connection
        connection = await self.take()
        await self._offer(connection)
        return connection

    async def _next(self) -> Connection:
        failures = self._failures
        async with self._news:
            while True:
                while self._ready:
                    connection = self._ready.popleft()
                    if connection.usable:
                        return connection
                if self._failures != failures:
                    raise unavailable(self._failure)
                self._grow()
                await self._news.wait()

    def _grow(self) -> None:
        """Opens what is waited for or kept warm, within the cap."""
        while (
            len(self._ready) + self._coming < self._waiting + self._config.warm and len(self._all) < self._config.most
        ):
            self._coming += 1
            self._tasks.start_soon(self._bring, self._new())

    def _new(self) -> Connection:
        connection = self._begin()
        self._all.add(connection)
        self._tasks.start_soon(self._bury, connection)
        return connection

    async def _bring(self, connection: Connection) -> None:
        """Goes on when the one who waited has left, so that the next one need not wait as long."""
        await connection.met.wait()
        self._coming -= 1
        if connection.usable:
            await self._offer(connection)
            return
        async with self._news:
            self._failures, self._failure = self._failures + 1, str(connection.ending)
            self._news.notify_all()
        self._trouble.set()

    async def _offer(self, connection: Connection) -> None:
        async with self._news:
            self._ready.append(connection)
            self._news.notify_all()
        self._tasks.start_soon(self._recycle, connection)

    async def _recycle(self, connection: Connection) -> None:
        """Closes it when nobody has wanted it for a while, unless it is one of those kept warm."""
        while connection in self._ready:
            with anyio.move_on_after(self._config.idle_s):
                await connection.down.wait()
            if connection in self._ready and (not connection.usable or len(self._ready) > self._config.warm):
                self._ready.remove(connection)
                connection.close()

    async def _bury(self, connection: Connection) -> None:
        """Its place comes back when it is wholly gone, so that the cap holds for processes too."""
        await connection.gone.wait()
        self._all.discard(connection)
        async with self._news:
            self._news.notify_all()

    def give_back(self, connection: Connection) -> None:
        """Closed, because what a session left in it belongs to that session alone."""
        connection.close()

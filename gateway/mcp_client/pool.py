"""Connection pools of one MCP server: one connection for all sessions, or one leased to each session.

A leased connection is closed after its session and never reused, because the server may keep state in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from gateway.config.models import Server
from gateway.config.rollout_variables import needs_rollout
from gateway.mcp_client.connection import Connection
from gateway.mcp_client.errors import CloseReason, UpstreamError
from gateway.mcp_client.rollout_folder import LISTING, RolloutIdentity
from gateway.types import Outcome

MAX_WAIT_S = 600.0
_DEADLINE_MARGIN_S = 0.05
"""Waits end this long before the caller's deadline, so that it gets the reason instead of a timeout."""
_RELEASE_S = 4.0
"""How long to wait for the end of a lost process before its successor starts."""


def unavailable_error(reason: str) -> UpstreamError:
    """The error for a request that was never sent."""
    return UpstreamError(Outcome.UNAVAILABLE, reason)


def remaining_wait_s() -> float:
    """How long a caller may wait and still get a reason before its own deadline."""
    left_s = anyio.current_effective_deadline() - anyio.current_time()
    return min(MAX_WAIT_S, max(0.0, left_s - min(_DEADLINE_MARGIN_S, left_s / 10)))


StartConnection = Callable[[RolloutIdentity], Connection]


class SharedConnection:
    """One connection for all sessions."""

    def __init__(self, start_connection: StartConnection, get_down_reason: Callable[[], str | None]) -> None:
        self._start_connection, self._get_down_reason = start_connection, get_down_reason
        self._current: Connection | None = None
        self._latest: Connection | None = None
        self._changed = anyio.Event()

    @property
    def connections(self) -> tuple[Connection, ...]:
        return () if self._current is None else (self._current,)

    async def connect(self) -> Connection:
        """A new connection whose handshake may still fail; its listing is read before it is used."""
        self._latest = self._start_connection(LISTING)
        return self._latest

    async def use_until_lost(self, connection: Connection) -> CloseReason:
        """Offers a working connection to sessions; returns why the server must be connected to again."""
        self._current = connection
        self.wake_waiters()
        await connection.draining.wait()
        self._current = None
        if connection.close_reason is not None:
            # Two processes of one server could get in each other's way.
            with anyio.move_on_after(_RELEASE_S):
                await connection.released.wait()
        return connection.close_reason or CloseReason(connection.retire_reason or "the connection was lost")

    def wake_waiters(self) -> None:
        """Lets waiting callers check the state again."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def acquire(self, rollout: RolloutIdentity = LISTING) -> Connection:
        """The connection. Callers wait while the server is being connected to, and fail once it is known to be down."""
        if self._current is not None and self._current.is_usable:
            return self._current
        with anyio.move_on_after(remaining_wait_s()):
            while self._current is None or not self._current.is_usable:
                if (reason := self._get_down_reason()) is not None:
                    raise unavailable_error(reason)
                await self._changed.wait()
            return self._current
        raise unavailable_error("the server is still being connected to")

    acquire_any = acquire
    """For one request that belongs to no session."""

    def close_all(self, reason: str) -> None:
        """Closes every connection, those being made included, so that the server is connected to again."""
        if self._latest is not None:
            self._latest.close(reason)


class LeasedConnections:
    """One connection for each session, at most `most` of them, with `warm` ones opened in advance."""

    def __init__(self, start_connection: StartConnection, config: Server, tasks: TaskGroup) -> None:
        self._start_connection, self._config, self._tasks = start_connection, config, tasks
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._waiting = self._opening = self._failure_count = 0
        self._last_failure = ""
        self._changed = anyio.Condition()
        self._open_failed = anyio.Event()
        self._open_failure = CloseReason("the connection was lost")
        self._needs_rollout = needs_rollout(config)

    @property
    def connections(self) -> tuple[Connection, ...]:
        return tuple(self._all)

    async def connect(self) -> Connection:
        return await self._open_within_limit(LISTING)

    async def _open_within_limit(self, rollout: RolloutIdentity) -> Connection:
        async with self._changed:
            while len(self._all) >= self._config.most:
                if self._needs_rollout and self._idle:
                    self._idle.popleft().close()  # It only served the listing.
                await self._changed.wait()
            return self._open_connection(rollout)

    async def use_until_lost(self, connection: Connection) -> CloseReason:
        """Leases come and go. What counts is one that cannot be opened, not the end of the one for the listing."""
        self._open_failed = anyio.Event()
        await self._add_idle(connection)
        self._open_needed()
        await self._open_failed.wait()
        return self._open_failure

    async def acquire(self, rollout: RolloutIdentity = LISTING) -> Connection:
        wait_s = remaining_wait_s()
        if self._needs_rollout and rollout is not LISTING:
            with anyio.move_on_after(wait_s):
                return await self._open_for(rollout)
            raise self._in_use_error(wait_s)
        self._waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                return await self._acquire_idle()
        finally:
            self._waiting -= 1
            self._open_needed()
        if self._opening:
            raise unavailable_error("the server is still being connected to")
        raise self._in_use_error(wait_s)

    def _in_use_error(self, wait_s: float) -> UpstreamError:
        return unavailable_error(f"all {self._config.most} connections (`most`) were in use for {wait_s:.1f} s")

    async def _open_for(self, rollout: RolloutIdentity) -> Connection:
        """A new connection, whose process is started for this rollout."""
        connection = await self._open_within_limit(rollout)
        try:
            await connection.handshake_done.wait()
        except BaseException:
            connection.close()
            raise
        if not connection.is_usable:
            self._record_failure(connection)
            raise unavailable_error(str(connection.close_reason))
        return connection

    async def acquire_any(self) -> Connection:
        for connection in self._idle:  # A leased one holds the state of its session.
            if connection.is_usable:
                return connection
        connection = await self.acquire()
        await self._add_idle(connection)
        return connection

    async def _acquire_idle(self) -> Connection:
        failure_count = self._failure_count
        async with self._changed:
            while True:
                while self._idle:
                    connection = self._idle.popleft()
                    if connection.is_usable:
                        return connection
                if self._failure_count != failure_count:
                    raise unavailable_error(self._last_failure)
                self._open_needed()
                await self._changed.wait()

    def _open_needed(self) -> None:
        """Opens connections for waiting callers and for the warm reserve, within the limit."""
        while (
            len(self._idle) + self._opening < self._waiting + self._config.warm and len(self._all) < self._config.most
        ):
            self._opening += 1
            self._tasks.start_soon(self._add_when_ready, self._open_connection())

    def _open_connection(self, rollout: RolloutIdentity = LISTING) -> Connection:
        connection = self._start_connection(rollout)
        self._all.add(connection)
        self._tasks.start_soon(self._forget_when_released, connection)
        return connection

    async def _add_when_ready(self, connection: Connection) -> None:
        """Adds a new connection once its handshake is done, even if the caller that wanted it has given up."""
        await connection.handshake_done.wait()
        self._opening -= 1
        if connection.is_usable:
            await self._add_idle(connection)
            return
        async with self._changed:
            self._failure_count, self._last_failure = self._failure_count + 1, str(connection.close_reason)
            self._changed.notify_all()
        self._record_failure(connection)

    def _record_failure(self, connection: Connection) -> None:
        self._open_failure = connection.close_reason or CloseReason("the connection was lost")
        self._open_failed.set()

    async def _add_idle(self, connection: Connection) -> None:
        async with self._changed:
            self._idle.append(connection)
            self._changed.notify_all()
        self._tasks.start_soon(self._close_when_idle, connection)

    async def _close_when_idle(self, connection: Connection) -> None:
        """Closes a connection that has been idle too long, unless it belongs to the warm reserve."""
        while connection in self._idle:
            with anyio.move_on_after(self._config.idle_s):
                await connection.closed.wait()
            if connection in self._idle and (not connection.is_usable or len(self._idle) > self._config.warm):
                self._idle.remove(connection)
                connection.close()

    async def _forget_when_released(self, connection: Connection) -> None:
        """Frees a connection's slot only when it is fully released, so that the limit holds for processes too."""
        await connection.released.wait()
        self._all.discard(connection)
        async with self._changed:
            self._changed.notify_all()

    def close_all(self, reason: str) -> None:
        for connection in self.connections:
            connection.close(reason)
        self._open_failure = CloseReason(reason)
        self._open_failed.set()


ConnectionPool = SharedConnection | LeasedConnections
"""Where sessions get their connections from."""

"""A gateway is one toolset made of many sources, which come and go while rollouts hold what they opened."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus

from gateway.errors import GatewayError, TooManySessions, innermost
from gateway.session import RELEASE_S, GatewaySession, Observer, hears
from gateway.table import EMPTY_TABLE, Source, Table, stale, table
from gateway.types import Task, ToolSpec

if TYPE_CHECKING:
    from gateway.build import Places
    from gateway.config.models import ResultLimit

log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""How often sessions are looked over for those whose time is up."""


class _Host:
    """The task that enters a source and leaves it, as connections want of their owner."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.users = 0
        self.retired = False
        self._stop = anyio.Event()
        self.ended = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        started = False
        try:
            async with self.source.toolset:
                started = True
                task_status.started()
                await self._stop.wait()
        except Exception:  # boundary: a source that cannot close cleanly must not take the others with it
            if not started:
                raise
            log.exception("closing %s failed", self.source.key)
        finally:
            self.ended.set()

    def retire(self) -> None:
        """Ends once the last session that uses it has closed."""
        self.retired = True
        self.release(0)

    def release(self, count: int = 1) -> None:
        self.users -= count
        if self.retired and self.users <= 0:
            self._stop.set()


class Gateway:
    """Enter it, then `open(task)` a session for each rollout."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        services: AbstractAsyncContextManager[Any] | None = None,
        most_sessions: int = 10_000,
    ) -> None:
        self._first = tuple(sources)
        self._services = services
        self._most_sessions = most_sessions
        self._hosts: list[_Host] = []
        self._table: Table = EMPTY_TABLE
        self._entered: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self.sessions: dict[str, GatewaySession] = {}
        self.observers: list[Observer] = []
        self.on_change: list[Callable[[], None]] = []
        """Called when the list of tools may have changed."""

    @classmethod
    def load(
        cls,
        tools: Places = "tool_configs",
        servers: Path | str | None = "mcp_servers.json",
        result_limit: ResultLimit | None = None,
    ) -> Self:
        """A gateway as the files say; raises `ConfigError` with every mistake in them.

        `result_limit` holds for each entry that has none of its own.
        """
        from gateway.build import plan  # reading YAML is for those who have files

        made = plan(tools, servers, result_limit=result_limit)
        return cls(made.sources, services=made.services)

    async def __aenter__(self) -> Self:
        try:
            async with AsyncExitStack() as stack:
                await self._enter(stack)
                self._stack = stack.pop_all()
        except BaseExceptionGroup as group:
            raise innermost(group) from group
        return self

    async def _enter(self, stack: AsyncExitStack) -> None:
        if self._services is not None:
            await stack.enter_async_context(self._services)
        self._entered = await stack.enter_async_context(anyio.create_task_group())
        stack.push_async_callback(self._stop)
        self._hosts = await self._start(self._first)
        self._table = table(self._first, starting=True)
        self._tasks.start_soon(self._sweep)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's own error is not ours to wrap into a group, so the stack does not hear of it.
        await self._stack.aclose()

    @property
    def _tasks(self) -> TaskGroup:
        if self._entered is None:
            raise GatewayError("the gateway is not running: enter it first, `async with Gateway(...) as gateway`")
        return self._entered

    @property
    def table(self) -> Table:
        sources = self.sources
        if stale(self._table, sources):
            self._table = table(sources, self._table)
        return self._table

    @property
    def sources(self) -> list[Source]:
        return [host.source for host in self._hosts]

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """Everything offered now, what is meant for the loop included."""
        return self.table.specs

    @asynccontextmanager
    async def open(self, task: Task = Task()) -> AsyncIterator[GatewaySession]:  # noqa: B008 - frozen
        """A session for the length of a block."""
        session = await self.begin(task)
        try:
            yield session
        finally:
            await session.close()

    async def begin(self, task: Task) -> GatewaySession:
        """A session without a block around it: whoever begins it must close it, or give it a time to live."""
        if len(self.sessions) >= self._most_sessions:
            raise TooManySessions(f"{self._most_sessions} sessions are open; close some, or raise the limit")
        session = self._session(secrets.token_urlsafe(24), task)
        known = {id(host.source): host for host in self._hosts}
        hosts = [known[id(source)] for source in session.sources]
        for host in hosts:
            # Before the first wait: a reload meanwhile must not end what the session is about to use.
            host.users += 1
            session.stack.callback(host.release)
        try:
            for host in hosts:
                await self._join(session, host.source)
        except BaseException:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await session.stack.aclose()
            raise
        self.sessions[session.id] = session
        session.stack.callback(self.sessions.pop, session.id, None)
        return session

    def _session(self, id: str, task: Task) -> GatewaySession:
        return GatewaySession(id, task, self.table, self.observers)

    async def _join(self, session: GatewaySession, source: Source) -> None:
        inner = await session.stack.enter_async_context(source.toolset.open(session.asks_of(source)))
        session.inner[id(source)] = inner
        if hears(inner):
            session.heard = inner

    async def reload(self, sources: Sequence[Source]) -> None:
        """Takes over a new configuration: equal sources stay, new ones start, old ones end with their last session.

        What cannot start, or collides, is refused whole, and everything stays as it was.
        """
        kept = {host.source.key: host for host in self._hosts}
        new = await self._start([source for source in sources if source.key not in kept])
        started = {host.source.key: host for host in new}
        hosts = [kept.get(source.key) or started[source.key] for source in sources]
        try:
            fresh = table([host.source for host in hosts], starting=True)
        except GatewayError:
            for host in new:
                host.retire()
            raise
        gone = [host for host in self._hosts if host not in hosts]
        self._hosts, self._table = hosts, fresh
        for host in gone:
            host.retire()
        self._changed()

    async def _start(self, sources: Sequence[Source]) -> list[_Host]:
        hosts = [_Host(source) for source in sources]
        try:
            async with anyio.create_task_group() as starting:
                for host in hosts:
                    starting.start_soon(self._start_one, host)
        except BaseExceptionGroup as group:
            for host in hosts:
                host.retire()
            raise innermost(group) from group
        return hosts

    async def _start_one(self, host: _Host) -> None:
        await self._tasks.start(host.run)
        listeners = getattr(host.source.leaf, "on_change", None)
        if isinstance(listeners, list):
            listeners.append(self._changed)

    def _changed(self) -> None:
        for listener in self.on_change:
            listener()

    async def _sweep(self) -> None:
        while True:
            await anyio.sleep(SWEEP_S)
            for session in list(self.sessions.values()):
                if session.remaining_s == 0.0 and not session.closed:
                    log.info("a session of task %r expired", session.task.id)
                    self._tasks.start_soon(session.close)

    async def _stop(self) -> None:
        """Sessions first, then what they stood on."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for session in list(self.sessions.values()):
                    closing.start_soon(session.close)
            for host in self._hosts:
                host.retire()
            with anyio.move_on_after(15):
                for host in self._hosts:
                    await host.ended.wait()
        self._tasks.cancel_scope.cancel()

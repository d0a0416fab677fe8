"""`Gateway`: combines sources into one set of tools, opens sessions on them, and reloads while sessions are open."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus

from gateway.argument_checks import ArgumentChecks
from gateway.errors import GatewayError, SessionError, TooManySessions, unwrap_error
from gateway.loop_watchdog import LoopWatchdog
from gateway.server_start import ServerStart, StartingServer, describe_starting
from gateway.session import RELEASE_TIMEOUT_S, GatewaySession, Observer, has_feedback
from gateway.session_protocols import open_session
from gateway.tool_table import EMPTY_TABLE, Source, ToolTable, build_table
from gateway.toolset import Toolset
from gateway.types import Task, ToolSpec

if TYPE_CHECKING:
    from gateway.build import ToolFiles
    from gateway.config.configured_server import ConfiguredServer
    from gateway.config.models import Instructions, ResultLimit

log = logging.getLogger(__name__)

DEFAULT_SERVERS = Path("mcp_servers.json")


@dataclass(frozen=True, slots=True)
class ReloadRefusal:
    """A configuration that was refused, so that the one before it stays in use."""

    error: str
    at: float
    """Unix time."""


EXPIRY_CHECK_S = 1.0
"""Interval of the check for expired sessions."""


class _RunningSource:
    """A source and the one task that enters and leaves it, as its connections require."""

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
        except Exception:  # boundary: an error while closing one source must not affect the others
            if not started:
                raise
            log.exception("closing %s failed", self.source.key)
        finally:
            self.ended.set()

    def retire(self) -> None:
        """Closes the source once the last session that uses it has closed."""
        self.retired = True
        self.release(0)

    def release(self, count: int = 1) -> None:
        self.users -= count
        if self.retired and self.users <= 0:
            self._stop.set()


def _listeners(source: Source) -> list[Callable[[], None]] | None:
    """What a source calls when its list of tools has changed; None if it says nothing."""
    listeners = getattr(source.backend, "on_change", None)
    return listeners if isinstance(listeners, list) else None


class Gateway:
    """Tools from many sources. Enter it, then `open(task)` a session for each rollout."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        services: AbstractAsyncContextManager[Any] | None = None,
        max_sessions: int = 10_000,
        start: ServerStart | None = None,
    ) -> None:
        """`start` says how long to wait for servers; by default, until each is up or has failed."""
        self._initial_sources = tuple(sources)
        self._services = services
        self._max_sessions = max_sessions
        self.start = start or ServerStart()
        self._running: list[_RunningSource] = []
        self._table: ToolTable = EMPTY_TABLE
        self._has_changed = True
        """Whether a source said that its list of tools is another one."""
        self._polled: list[tuple[Toolset, Sequence[ToolSpec]]] = []
        """The sources that say no such thing, with their lists: each is the same object until it changes."""
        self._task_group: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self.sessions: dict[str, GatewaySession] = {}
        self._taken_ids: set[str] = set()
        """Those of sessions that are open or being opened."""
        self.loop_watchdog = LoopWatchdog()
        self.argument_checks = ArgumentChecks()
        self.observers: list[Observer] = []
        self.reload_refusal: ReloadRefusal | None = None
        """Why the files as they are now are not in use, if that is so."""
        self.servers: tuple[ConfiguredServer, ...] = ()
        """The servers of the configuration files, with what is offered of each."""
        self.on_change: list[Callable[[], None]] = []
        """Callbacks for when the list of tools may have changed."""

    @classmethod
    def load(
        cls,
        tools: ToolFiles = "tool_configs",
        servers: Path | str | None = DEFAULT_SERVERS,
        result_limit: ResultLimit | None = None,
        sources: Sequence[Source] = (),
        start: ServerStart | None = None,
        instructions: Instructions | None = None,
    ) -> Self:
        """A gateway from configuration files; raises `ConfigError` with all errors in them.

        By default `servers` is mcp_servers.json in the working folder, or beside `tools`, if it is there.
        `result_limit` and `instructions` apply to each entry and server without its own; `sources` are offered beside
        those of the files.
        """
        from gateway.build import build_plan  # YAML is only needed for files

        if servers is DEFAULT_SERVERS:
            folders = [Path(), *([Path(tools).resolve().parent] if isinstance(tools, Path | str) else ())]
            servers = next((folder / servers for folder in folders if (folder / servers).exists()), None)
        plan = build_plan(tools, servers, result_limit=result_limit, instructions=instructions)
        gateway = cls((*plan.sources, *sources), services=plan.services, start=start)
        gateway.servers = tuple(plan.config.servers.values())
        return gateway

    async def __aenter__(self) -> Self:
        try:
            async with AsyncExitStack() as stack:
                await self._enter(stack)
                self._stack = stack.pop_all()
        except BaseExceptionGroup as group:
            raise unwrap_error(group) from group
        return self

    async def _enter(self, stack: AsyncExitStack) -> None:
        if self._services is not None:
            await stack.enter_async_context(self._services)
        stack.push_async_callback(self.argument_checks.close)
        self._task_group = await stack.enter_async_context(anyio.create_task_group())
        stack.push_async_callback(self._stop)
        self._running = await self._start(self._initial_sources)
        if not self.start.listen_first:
            await self.start.wait_for_all()
        self._set_table(build_table(self._initial_sources, starting=True))
        self._tasks.start_soon(self._close_expired_sessions)
        self._tasks.start_soon(self.loop_watchdog.run)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def _tasks(self) -> TaskGroup:
        if self._task_group is None:
            raise GatewayError("the gateway is not running: enter it first, `async with Gateway(...) as gateway`")
        return self._task_group

    @property
    def table(self) -> ToolTable:
        if self._has_changed or any(listing is not toolset.specs for toolset, listing in self._polled):
            self._set_table(build_table(self.sources, self._table))
        return self._table

    def _set_table(self, table: ToolTable) -> None:
        """Stores a new table, and logs the clashes of names that the last one did not have."""
        pairs = zip(self.sources, table.listings, strict=True)
        self._polled = [(source.toolset, listing) for source, listing in pairs if _listeners(source) is None]
        self._has_changed = False
        for name, text in table.clashes.items():
            if self._table.clashes.get(name) != text:
                log.warning("the name of tool %s is taken: %s", name, text)
        self._table = table

    @property
    def sources(self) -> list[Source]:
        return [host.source for host in self._running]

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """All tools offered now, including those for the training loop."""
        return self.table.specs

    def open(self, task: Task = Task()) -> AbstractAsyncContextManager[GatewaySession]:  # noqa: B008 - frozen
        """Opens a session for a `with` block."""
        return open_session(partial(self.begin, task))

    async def begin(
        self, task: Task, table: Callable[[], ToolTable] | None = None, observers: Sequence[Observer] | None = None
    ) -> GatewaySession:
        """Opens a session without a `with` block; the caller must close it, or give the task a `ttl_s`.

        `table` gives the part of the gateway's table that the session may use, and `observers` replace the gateway's.
        """
        if len(self.sessions) >= self._max_sessions:
            raise TooManySessions(f"{self._max_sessions} sessions are open; close some, or raise the limit")
        if self.start.names:
            await self._wait_for_tools(task)
        offered = self.table if table is None else table()
        session_id = task.session_id or secrets.token_urlsafe(24)
        if session_id in self._taken_ids:
            raise SessionError("a session with this id is open")
        session = self._make_session(session_id, task, offered, observers or self.observers)
        session.late_servers = self.start.names
        running = {id(host.source): host for host in self._running}
        hosts = [running[id(source)] for source in session.sources]
        for host in hosts:
            host.users += 1  # before the first await, so that a reload meanwhile cannot close the source
        self._taken_ids.add(session_id)
        session.stack.callback(self._release, session.id, hosts)
        try:
            for host in hosts:
                await self._open_source(session, host.source)
        except BaseException:
            with anyio.move_on_after(RELEASE_TIMEOUT_S, shield=True):
                await session.stack.aclose()
            raise
        self.sessions[session.id] = session
        return session

    def _release(self, session_id: str, hosts: Sequence[_RunningSource]) -> None:
        self._taken_ids.discard(session_id)
        self.sessions.pop(session_id, None)
        for host in hosts:
            host.release()

    async def _wait_for_tools(self, task: Task) -> None:
        """Waits for the servers of the tools that a task names; a task without names gets what listings show."""
        wanted = {*(task.tools or ()), *task.create}
        if wanted:
            await self.start.wait_for_tools(lambda: wanted <= self.table.tools.keys())
        else:
            await self.start.settle()
        if late := sorted(wanted - self.table.tools.keys()) if self.start.names else ():
            raise SessionError(f"no tool named {', '.join(map(repr, late))} yet: {describe_starting(self.start.names)}")

    def _make_session(self, id: str, task: Task, table: ToolTable, observers: Sequence[Observer]) -> GatewaySession:
        return GatewaySession(id, task, table, observers, self.argument_checks)

    async def _open_source(self, session: GatewaySession, source: Source) -> None:
        inner = await session.stack.enter_async_context(source.toolset.open(session.task_for(source)))
        session.source_sessions[id(source)] = inner
        session.add_own_tools(source, getattr(inner, "own_specs", ()))
        if has_feedback(inner):
            session.feedback_session = inner

    async def reload(self, sources: Sequence[Source]) -> None:
        """Switches to new sources: unchanged ones stay, new ones start, old ones close with their last session.

        If a source cannot start or two tools have one name, raises and changes nothing.
        """
        running = {host.source.key: host for host in self._running}
        new = await self._start([source for source in sources if source.key not in running])
        started = {host.source.key: host for host in new}
        hosts = [running.get(source.key) or started[source.key] for source in sources]
        await self.start.wait_for_all()
        try:
            new_table = build_table([host.source for host in hosts], starting=True)
        except GatewayError:
            for host in new:
                host.retire()
            raise
        removed = [host for host in self._running if host not in hosts]
        self._running = hosts
        self._set_table(new_table)
        for host in removed:
            host.retire()
        self._notify_change()

    async def _start(self, sources: Sequence[Source]) -> list[_RunningSource]:
        hosts = [_RunningSource(source) for source in sources]
        self.start.begin()
        try:
            async with anyio.create_task_group() as starting:
                for host in hosts:
                    starting.start_soon(self._start_one, host)
        except BaseExceptionGroup as group:
            for host in hosts:
                host.retire()
            raise unwrap_error(group) from group
        return hosts

    async def _start_one(self, host: _RunningSource) -> None:
        backend = host.source.backend
        if isinstance(backend, StartingServer):
            backend.connects_in_background = True
            backend.start_is_reported = self.start.is_reported
        await self._tasks.start(host.run)
        if isinstance(backend, StartingServer):
            self.start.add(backend)
            self._tasks.start_soon(self.start.follow, backend)
        if (listeners := _listeners(host.source)) is not None:
            listeners.append(self._notify_change)

    def _notify_change(self) -> None:
        self._has_changed = True
        for listener in self.on_change:
            listener()

    async def _close_expired_sessions(self) -> None:
        while True:
            await anyio.sleep(EXPIRY_CHECK_S)
            self._close_sessions_that_expired()

    def _close_sessions_that_expired(self) -> None:
        """A function of its own, whose variable does not hold the last session until the next look."""
        for session in list(self.sessions.values()):
            if session.remaining_s == 0.0 and not session.closed:
                log.info("a session of task %r expired", session.task.id)
                self._tasks.start_soon(partial(session.close, is_abandoned=True))

    async def _stop(self) -> None:
        """Closes the sessions, then the sources."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for session in list(self.sessions.values()):
                    closing.start_soon(partial(session.close, is_abandoned=True))
            for host in self._running:
                host.retire()
            with anyio.move_on_after(15):
                for host in self._running:
                    await host.ended.wait()
        self._tasks.cancel_scope.cancel()

"""An MCP server is a toolset: it may be late, die and come back, and each of these costs only the calls it hits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from gateway.config.models import Server
from gateway.toolset import Session
from gateway.types import ALONE, Context, Task, ToolSpec
from gateway.upstream.connection import Connection
from gateway.upstream.dial import Line, Way, ways
from gateway.upstream.fault import Ending, UpstreamError
from gateway.upstream.listing import Listing, read
from gateway.upstream.pool import Leased, Shared, Supply, unavailable
from gateway.upstream.services import Services
from gateway.upstream.session import Reading, Readings, UpstreamSession
from gateway.upstream.status import ServerStatus, State

FIRST_PAUSE_S, LONGEST_PAUSE_S, SETTLED_S = 0.2, 30.0, 10.0
_GOODBYE_S = 4.0
_WORD_S = 0.4
"""Beyond the deadline of connecting, which ends with a reason, so that nobody looks before it is told."""
_TOOLS_CHANGED = "notifications/tools/list_changed"

OnNotice = Callable[[str, Mapping[str, Any]], None]


class McpToolset:
    """The tools of one MCP server. A server that is down offers what it last offered, or nothing."""

    def __init__(
        self, name: str, config: Server, *, services: Services, parse: Mapping[str, Reading] | None = None
    ) -> None:
        """`parse` gives the reading of a tool's results by its name; `*` is for every other tool."""
        self.name, self.config, self.services = name, config, services
        self.readings = Readings(parse or {})
        self.on_notice: list[OnNotice] = []
        self.on_change: list[Callable[[], None]] = []
        self.listing = Listing()
        self._way: Way | None = None
        self._probe = True
        self._era: tuple[str, Mapping[str, Any], str | None] = "", {}, None
        self._state: State = "connecting"
        self._ending: Ending | None = None
        self._since = 0.0
        self._connects = 0
        self._refused: str | None = None
        """Why a call need not wait: the last attempt to connect failed."""

    @property
    def owner(self) -> str:
        return f"mcp server {self.name!r}"

    @property
    def shared(self) -> bool:
        return self.config.isolation == "shared"

    async def __aenter__(self) -> Self:
        self._tried, self._news = anyio.Event(), anyio.Event()
        self._speaker: Connection | None = None
        self._keeping = anyio.CancelScope()
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        self.supply: Supply = (
            Shared(self._begin, lambda: self._refused) if self.shared else Leased(self._begin, self.config, self._tasks)
        )
        self._say("connecting")
        self._tasks.start_soon(self._keep)
        self._tasks.start_soon(self._refresh)
        try:
            with anyio.move_on_after(self.config.connect_timeout_s + _WORD_S):
                await self._tried.wait()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._keeping.cancel()  # or it would reach for the server anew as soon as its connection is closed
        with anyio.move_on_after(_GOODBYE_S, shield=True):
            connections = self.supply.connections
            for connection in connections:
                connection.close()
            for connection in connections:
                await connection.gone.wait()
        self._tasks.cancel_scope.cancel()
        # The error is not ours, and in our task group it would arrive in a group of one.
        await self._tasks.__aexit__(None, None, None)
        return None

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.listing.specs

    @property
    def protocol_version(self) -> str:
        return self._era[0]

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """As the server declared them when it was last met."""
        return self._era[1]

    @property
    def instructions(self) -> str | None:
        return self._era[2]

    @property
    def status(self) -> ServerStatus:
        children = (connection.line.child for connection in self.supply.connections)
        return ServerStatus(
            name=self.name,
            state=self._state,
            reason=str(self._ending or ""),
            remedy=self._remedy,
            tools=len(self.specs),
            quarantined=self.listing.quarantined,
            transport=self._way or "",
            protocol_version=self.protocol_version,
            children=tuple(child.pid for child in children if child is not None and child.pid is not None),
            reconnects=max(0, self._connects - 1),
            since=self._since,
        )

    @property
    def _remedy(self) -> str:
        """What its operator wrote down for this helps more than what we know of such faults."""
        if self._ending is None:
            return ""
        return f"start it: {self.config.start}" if self.config.start else self._ending.remedy

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        """Takes no connection yet: many rollouts never call."""
        session = UpstreamSession(self)
        try:
            yield session
        finally:
            session.close()

    async def request(
        self, method: str, params: Mapping[str, Any], context: Context = ALONE, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Any other request of the protocol, raw; raises `UpstreamError` with its JSON-RPC code."""
        with anyio.move_on_after(timeout_s):
            connection = await self.supply.borrow()
            return await connection.request(method, params, context)
        raise unavailable(f"no answer to {method} within {timeout_s:g} s")

    def _begin(self) -> Connection:
        way = self._way or ways(self.config)[0]
        line = Line(way, self.config, self.services, probe=self._probe)
        connection = Connection(line, self._hear, shared=self.shared)
        self._tasks.start_soon(connection.run)
        return connection

    async def _keep(self) -> None:
        """Reaches the server, keeps it in use, and comes back for it whenever it is lost."""
        with self._keeping:
            await self._keep_reaching()

    async def _keep_reaching(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            connection = await self._reach()
            self._tried.set()
            if connection is not None:
                began = anyio.current_time()
                await self.supply.keep(connection)
                self._say("connecting", connection.ending)
                if anyio.current_time() - began > SETTLED_S:
                    pause_s = FIRST_PAUSE_S
                    continue
            await anyio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (spreads load, guards nothing)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _reach(self) -> Connection | None:
        """A proven connection whose listing is read, over the first transport that fits."""
        deadline = anyio.current_time() + self.config.connect_timeout_s
        failed: list[tuple[Way, Ending]] = []
        for way in (self._way,) if self._way else ways(self.config):
            self._way = way
            connection = await self.supply.connect()
            await connection.met.wait()
            if connection.usable and await self._meet(connection, deadline):
                self._refused = None
                self._say("up")
                return connection
            self._way, self._probe = None, True
            failed.append((way, connection.ending or Ending("it was lost at once")))
            if not failed[-1][1].elsewhere:
                break
            self._say("connecting", failed[-1][1])
        self._fail(failed)
        return None

    async def _meet(self, connection: Connection, deadline: float) -> bool:
        try:
            with anyio.fail_after(max(0.5, deadline - anyio.current_time())):
                listing = await read(connection, self.owner)
        except UpstreamError as error:
            connection.close(f"its tools cannot be listed: {error.reason}")
            return False
        except TimeoutError:
            connection.close(f"its tools were not listed within {self.config.connect_timeout_s:g} s")
            return False
        era = connection.era
        self._era = era.version, era.capabilities, era.instructions
        self._probe = era.modern
        self._connects += 1
        self._adopt(listing)
        return True

    def _fail(self, failed: list[tuple[Way, Ending]]) -> None:
        ending = failed[-1][1]
        if len(failed) > 1:
            tried = "; ".join(f"as {way}: {one}" for way, one in failed)
            ending = Ending(tried, "see that `url` is the MCP endpoint, and name its `transport`")
        self._refused = f"{self.owner} is down: {ending}"
        self._say("stale" if self.specs else "down", ending)
        if isinstance(self.supply, Shared):
            self.supply.wake()

    def _say(self, state: State, ending: Ending | None = None) -> None:
        self._state, self._ending, self._since = state, ending, anyio.current_time()

    def _adopt(self, listing: Listing, *, told: bool = False) -> None:
        """Those who hold the specs may compare them by identity. `told`: the server itself speaks of a change."""
        same = listing.specs == self.listing.specs
        specs = self.listing.specs if same else listing.specs
        self.listing = Listing(specs, listing.quarantined, listing.header_maps)
        if told or not same:
            for changed in tuple(self.on_change):
                changed()

    def _hear(self, connection: Connection, method: str, params: Mapping[str, Any]) -> None:
        if method == _TOOLS_CHANGED:
            self._speaker = connection
            self._news.set()
        for hear in tuple(self.on_notice):
            hear(method, params)

    async def _refresh(self) -> None:
        """Reads the listing again when it has changed; several changes at once are one."""
        while True:
            await self._news.wait()
            self._news, speaker = anyio.Event(), self._speaker
            if speaker is None or not speaker.usable:
                continue
            try:
                with anyio.fail_after(self.config.connect_timeout_s):
                    self._adopt(await read(speaker, self.owner), told=True)
            except (UpstreamError, TimeoutError):
                # What was listed before stays; the loss of the connection is dealt with where it is kept.
                continue

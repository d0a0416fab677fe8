"""A connection has one owner, which opens and closes it; callers only talk, and its loss is theirs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import anyio
from anyio.abc import TaskGroup, TaskStatus
from mcp.client._transport import TransportStreams
from mcp.shared.dispatcher import CallOptions, DispatchContext, ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import CONNECTION_CLOSED

from gateway.types import ALONE, Context, Outcome
from gateway.upstream.asked import answer, rounds
from gateway.upstream.bridge import Bridge
from gateway.upstream.dial import Line
from gateway.upstream.era import Era, negotiate
from gateway.upstream.fault import (
    AUTH_REMEDY,
    SDK_CLOSED,
    Ending,
    Flight,
    UpstreamError,
    explain,
    flight_now,
    unauthorized,
)

OnNotice = Callable[["Connection", str, Mapping[str, Any]], None]
_HUSHED = ("notifications/progress", "notifications/cancelled", "notifications/subscriptions/acknowledged")
_ASKS_BACK = ("tools/call", "prompts/get", "resources/read")
_LAST_WORD_S = 2.0
_START_REMEDY = "start the server, or mend its `url`"
_RUN_REMEDY = "run its `command` with its `args` by hand, and see why"
_MCP_REMEDY = "see whether it speaks MCP at all"


class Connection:
    """One conversation with one server. `run` owns it; everything else may be called from any task."""

    era: Era

    def __init__(self, line: Line, on_notice: OnNotice, *, shared: bool) -> None:
        self.line, self._on_notice, self._shared = line, on_notice, shared
        self.met, self.down, self.gone = anyio.Event(), anyio.Event(), anyio.Event()
        """It is known whether it can be used; it cannot any more; nothing of it is left."""
        self.ending: Ending | None = None
        self.retired: str | None = None
        self.flights: set[Flight] = set()
        self._over, self._leaving = anyio.Event(), anyio.Event()
        self._greeting = Flight(ALONE)
        self._fault: Exception | None = None
        self._dispatcher: JSONRPCDispatcher[TransportContext]

    async def run(self) -> None:
        """Opens, lives and closes, in the one task that may; connecting has a deadline, living has none."""
        timeout_s = self.line.config.connect_timeout_s
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + timeout_s) as patience:
                flight_now.set(self._greeting)
                try:
                    async with self.line.open() as streams:
                        try:
                            await self._live(streams, patience)
                        finally:
                            if patience.cancel_called:
                                self._settle(self._silent(timeout_s))
                except TimeoutError as error:
                    self._settle(self._failed(error))
            if patience.cancelled_caught:
                self._settle(self._silent(timeout_s))
        except Exception as error:
            # A transport may fail to open or to close in any way it likes; here it becomes a reason.
            self._settle(self._failed(error))
        finally:
            self._settle(Ending("closed"))
            self.gone.set()

    async def _live(self, streams: TransportStreams, patience: anyio.CancelScope) -> None:
        self._dispatcher = JSONRPCDispatcher(*streams, on_stream_exception=self._note_fault)
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._pump)
            try:
                timeout_s = self.line.config.connect_timeout_s
                self.era = await negotiate(self._greet, self._dispatcher.notify, timeout_s, probe=self.line.probe)
            except (MCPError, UpstreamError) as error:
                self._settle(await self._unwelcome(error))
            else:
                patience.deadline = math.inf
                await self._serve(tasks)
            tasks.cancel_scope.cancel()

    async def _serve(self, tasks: TaskGroup) -> None:
        self.bridge = Bridge(self.era, self._dispatcher)
        if self.era.modern:
            tasks.start_soon(self.bridge.listen)
        self.met.set()
        await self._over.wait()
        if self.ending is None:
            self._settle(await self._autopsy())

    async def _pump(self, *, task_status: TaskStatus[None]) -> None:
        try:
            await self._dispatcher.run(self._on_request, self._on_notify, task_status=task_status)
        finally:
            self._over.set()

    async def _greet(self, method: str, params: dict[str, Any], options: CallOptions) -> dict[str, Any]:
        self._greeting = Flight(ALONE)
        flight_now.set(self._greeting)
        return await self._dispatcher.send_raw_request(method, params, options)

    async def request(self, method: str, params: Mapping[str, Any], context: Context = ALONE) -> dict[str, Any]:
        """The raw result; `UpstreamError` says how it ended otherwise. Cancelling it cancels it upstream."""
        if (bridged := self.bridge.take(method, params)) is not None:
            return bridged
        if not self.era.modern or method not in _ASKS_BACK:
            return await self._once(method, params, context)
        return await rounds(lambda asked: self._once(method, asked, context), params, context)

    async def _once(self, method: str, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        if self.ending is not None:
            raise UpstreamError(Outcome.UNAVAILABLE, str(self.ending), code=CONNECTION_CLOSED)
        stamped, options = self.era.stamp(method, params, context)
        if context.progress is not None:
            options["on_progress"] = cast(ProgressFnT, context.progress)
        flight = Flight(context)
        token = flight_now.set(flight)
        self.flights.add(flight)
        try:
            return await self._dispatcher.send_raw_request(method, stamped, options)
        except MCPError as error:
            raise await self._explain(error, flight) from None
        finally:
            flight_now.reset(token)
            self.flights.discard(flight)
            if self.retired is not None and not self.flights:
                self.close(self.retired)

    async def _explain(self, error: MCPError, flight: Flight) -> UpstreamError:
        if error.code == CONNECTION_CLOSED and error.message == SDK_CLOSED:
            with anyio.move_on_after(_LAST_WORD_S):
                await self.down.wait()
        explained = explain(error, flight, self.ending)
        if flight.session_lost:
            self.close(explained.reason)
        elif flight.unreachable and self._shared:
            self.retire(explained.reason)
        return explained

    def retire(self, reason: str) -> None:
        """No new calls; those under way may end, because a server that refuses one may still answer others."""
        self.retired = reason
        self._leaving.set()

    async def until_leaving(self) -> None:
        """Returns when no new call should be made on it."""
        await self._leaving.wait()

    @property
    def usable(self) -> bool:
        return self.ending is None and self.retired is None and self.met.is_set()

    def close(self, reason: str = "closed") -> None:
        self._settle(Ending(reason))
        self._over.set()

    def _settle(self, ending: Ending) -> None:
        """The first reason is the true one."""
        if self.ending is None:
            self.ending = ending
            self.met.set()
            self.down.set()
            self._leaving.set()

    async def _on_request(
        self, _: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        return await answer(method, params, self._behind(), self.flights)

    async def _on_notify(
        self, _: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
    ) -> None:
        if method == "notifications/subscriptions/acknowledged" and self.bridge.missed():
            self._on_notice(self, "notifications/tools/list_changed", {})
        if method in _HUSHED:
            return
        told = params or {}
        self._on_notice(self, method, told)
        behind = self._behind() or (next(iter(self.flights)) if len(self.flights) == 1 else None)
        if method == "notifications/message" and behind is not None and behind.context.notice is not None:
            await behind.context.notice(method, told)

    def _behind(self) -> Flight | None:
        """The call in whose name the transport brought this message, where it knows."""
        flight = flight_now.get()
        return flight if flight in self.flights else None

    async def _note_fault(self, error: Exception) -> None:
        self._fault = error

    async def _autopsy(self) -> Ending:
        if self.line.child is not None:
            return Ending(await self.line.child.autopsy(), _RUN_REMEDY)
        return Ending(f"the connection was lost: {self._fault}" if self._fault else "the server closed the connection")

    async def _unwelcome(self, error: MCPError | UpstreamError) -> Ending:
        if isinstance(error, UpstreamError):
            return Ending(error.reason)
        if error.code == CONNECTION_CLOSED and error.message == SDK_CLOSED:
            with anyio.move_on_after(_LAST_WORD_S):
                await self._over.wait()
            return await self._autopsy()
        if self._greeting.status in (401, 403):
            return Ending(unauthorized(self._greeting), AUTH_REMEDY)
        reason = explain(error, self._greeting, None).reason
        if self._greeting.unreachable:
            return Ending(reason, _START_REMEDY)
        return Ending(f"the handshake failed: {reason}", _MCP_REMEDY, elsewhere=True)

    def _silent(self, timeout_s: float) -> Ending:
        if self.line.way == "stdio" and self.line.child is None:
            return Ending(f"no place for another child process came free within {timeout_s:g} s")
        notes = self.line.child.notes() if self.line.child else ()
        return Ending(f"no answer within {timeout_s:g} s", _MCP_REMEDY, notes=notes)

    def _failed(self, error: BaseException) -> Ending:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return Ending(f"cannot start {self.line.config.command!r}: {error.strerror}", "see `command` and `cwd`")
        if self._greeting.status in (401, 403):
            return Ending(unauthorized(self._greeting), AUTH_REMEDY)
        if self._greeting.unreachable:
            return Ending(str(error), _START_REMEDY)
        return Ending(f"{type(error).__name__}: {error}", _MCP_REMEDY)

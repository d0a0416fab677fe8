"""Health checks of one connection: pings a server that was silent or let a call time out, and closes a hung one.

A server that answers nothing may be busy with a call that still has time, so a ping waits for the calls under way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED

from gateway.config.models import Server
from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.errors import PendingRequest, current_request
from gateway.types import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from gateway.mcp_client.connection import Connection

_MAX_BUSY_S = 60.0
"""How long at most an unanswered ping waits for calls that still have time."""
_HUNG_STOP_S = 0.2
"""How long a hung process is asked to stop before it is killed."""


class ConnectionHealth:
    """What is known of a server's health: when it was last heard, and how many calls in a row timed out."""

    def __init__(self, config: Server, cuts: Counter[str]) -> None:
        """`cuts` counts floods by reason."""
        self._config, self._cuts = config, cuts
        self.heard_at = monotonic()
        """When the last message came from the server."""
        self.timeouts = 0
        """Calls that timed out since the last answer; of calls at the same time, one counts."""
        self.doubt: str | None = None
        """Why a ping is awaited now."""
        self.failure: str | None = None
        """Why the connection was closed, if the server was found to hang."""
        self._counted_at = -math.inf
        self._answers_pings = False
        self._check_wanted, self._news = anyio.Event(), anyio.Event()

    def hear(self) -> None:
        """Records that a message came."""
        self.heard_at, self.doubt = monotonic(), None
        self._news.set()

    @contextmanager
    def watch_request(self, pending: PendingRequest, dispatcher: Dispatcher) -> Iterator[None]:
        """A block around one request: records whether it was answered, timed out, or was given up by its caller."""
        started_at, deadline = monotonic(), anyio.current_effective_deadline()
        try:
            yield
        except BaseException as error:
            if isinstance(error, MCPError) and _is_answer(error, pending):
                self.record_answer()
            elif pending.credentials_wanted_at is not None or dispatcher.explain_silence(started_at):
                pass  # The server was not asked yet; or it spoke, and we could not read it, or not yet.
            elif not isinstance(error, Exception) and anyio.current_time() >= deadline:
                self._record_timeout(started_at)
            raise
        self.record_answer()

    def record_answer(self) -> None:
        self.timeouts = 0
        self.hear()

    def _record_timeout(self, started_at: float) -> None:
        if started_at >= self._counted_at:
            self._counted_at = monotonic()
            self.timeouts += 1
        self._check_wanted.set()

    def record_end(self) -> None:
        self._news.set()

    async def watch(self, connection: Connection, dispatcher: Dispatcher) -> None:
        """Closes the connection once its server is found to hang."""
        while (failure := await self._check_once(connection, dispatcher)) is None:
            pass
        self.failure = failure
        if connection.transport.child is not None:
            connection.transport.child.stop_timeout_s = _HUNG_STOP_S
        connection.close_hung(failure)

    async def _check_once(self, connection: Connection, dispatcher: Dispatcher) -> str | None:
        """Waits for a timeout or for a long silence, then pings; returns why the server counts as hung."""
        with anyio.move_on_after(self._config.ping_s):
            await self._check_wanted.wait()
        after_timeout, self._check_wanted = self._check_wanted.is_set(), anyio.Event()
        if self.timeouts >= self._config.timeouts_in_a_row:
            return f"{self.timeouts} calls in a row were not answered in time"
        if after_timeout:
            doubt = "a call was not answered in time"
        elif connection.pending or monotonic() - self.heard_at < self._config.ping_s:
            return None
        else:
            doubt = f"nothing came from it for {self._config.ping_s:g} s"
        self.doubt = doubt
        failure = await self._ping(connection, dispatcher)
        self.doubt = None
        return None if failure is None else f"it hangs: {doubt}, and {failure}"

    async def _ping(self, connection: Connection, dispatcher: Dispatcher) -> str | None:
        """Why no answer came, or None if anything was heard."""
        asked_at, busy = monotonic(), set(connection.pending)
        asked = {method: PendingRequest(DEFAULT_CONTEXT, cuts=self._cuts) for method in self._questions(connection)}
        failures: list[str] = []

        async def ask(method: str) -> None:
            if reason := await self._ask(connection, dispatcher, method, asked[method]):
                failures.append(reason)
                self._news.set()

        async with anyio.create_task_group() as tasks:
            for method in asked:
                tasks.start_soon(ask, method)
            while not failures and self.heard_at <= asked_at:
                self._news, now = anyio.Event(), monotonic()
                # Credentials that are slow to come are not the server's silence.
                deadline = asked_at + self._config.ping_timeout_s
                deadline += min(pending.credentials_wait_s(now) for pending in asked.values())
                is_busy = (dispatcher.is_reading or bool(busy & connection.pending)) and now < asked_at + _MAX_BUSY_S
                if now >= deadline and not is_busy:
                    failures.append(f"a ping was not answered within {now - asked_at:.1f} s")
                    break
                with anyio.move_on_after((deadline if now < deadline else asked_at + _MAX_BUSY_S) - now):
                    await self._news.wait()
            tasks.cancel_scope.cancel()
        return failures[0] if failures and self.heard_at <= asked_at else None

    def _questions(self, connection: Connection) -> tuple[str, ...]:
        """The requests that ask for a sign of life. Not every server answers pings, but each has listed its tools."""
        if connection.protocol.is_modern:
            return ("server/discover",)
        has_tools = "tools" in connection.protocol.capabilities
        return ("ping",) if self._answers_pings or not has_tools else ("ping", "tools/list")

    async def _ask(
        self,
        connection: Connection,
        dispatcher: Dispatcher,
        method: str,
        pending: PendingRequest,
    ) -> str | None:
        """Sends one request; returns why the server cannot be reached, if that is so."""
        params, options = connection.protocol.prepare_request(method, {}, DEFAULT_CONTEXT)
        current_request.set(pending)
        try:
            await dispatcher.send_raw_request(method, params, options)
        except MCPError as error:
            if pending.session_lost or pending.unreachable:
                return error.message
            if not _is_answer(error, pending):
                return None
        self._answers_pings = self._answers_pings or method == "ping"
        self.hear()
        return None


def _is_answer(error: MCPError, pending: PendingRequest) -> bool:
    """Whether the error came from the server, and is not ours about a connection that failed."""
    if pending.unreachable or error.code == CONNECTION_CLOSED:
        return False
    return pending.lost_reason is None or pending.http_status is not None

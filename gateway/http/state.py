"""The state that all HTTP handlers share: the gateway, the settings and the sessions opened over HTTP.

Sessions opened in other ways (MCP, in process) are not listed here, so no HTTP request can use them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import anyio
from starlette.types import Receive

from gateway.argument_checks import MAX_LENGTH
from gateway.gateway import Gateway
from gateway.http.activity import ActivityLog
from gateway.http.endpoint import DisconnectWatcher, has_left
from gateway.http.exchange import ClientDisconnected, session_not_found
from gateway.http.metrics import Metrics
from gateway.http.settings import Settings
from gateway.schema import drop_nulls, strict_schema
from gateway.session import GatewaySession
from gateway.types import Task, ToolCall


@dataclass(slots=True)
class HttpSession:
    """A session that was opened over HTTP."""

    session: GatewaySession
    strict_schemas: Mapping[str, Mapping[str, Any]]
    """Original parameters of the tools by name, if the policy saw those with strict schemas that can have one."""
    closed: anyio.Event | None = None
    """Set when it is closed, where its connection waits for that."""
    is_strict: bool = False
    calls: int = 0

    @property
    def expires_at(self) -> float | None:
        remaining_s = self.session.remaining_s
        return None if remaining_s is None else time.time() + remaining_s

    @property
    def rewards(self) -> list[dict[str, Any]]:
        return [asdict(reward) for reward in self.session.rewards]

    def without_forced_nulls(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """The calls without the nulls that strict schemas make a policy write for optional arguments."""
        return [self._without_forced_nulls(call) for call in calls] if self.strict_schemas else calls

    def _without_forced_nulls(self, call: ToolCall) -> ToolCall:
        parameters = self.strict_schemas.get(call.name)
        if parameters is None or "null" not in call.arguments or len(call.arguments) > MAX_LENGTH:
            return call
        if strict_schema(parameters) is None:
            return call
        try:
            arguments = drop_nulls(json.loads(call.arguments), parameters)
        except (ValueError, RecursionError):
            return call  # the argument check reports the error to the policy
        return replace(call, arguments=json.dumps(arguments, ensure_ascii=False))


class AppState:
    """One per application; passed to every handler."""

    def __init__(self, gateway: Gateway, settings: Settings, disconnects: DisconnectWatcher) -> None:
        self.gateway, self.settings, self.disconnects = gateway, settings, disconnects
        self.sessions: dict[str, HttpSession] = {}
        self._openings: dict[anyio.CancelScope, str] = {}
        """Of each session that is being opened, the id that its client has chosen."""
        self.metrics = Metrics(gateway)
        self.activity = ActivityLog(gateway, disconnects.stopping)
        gateway.observers.extend((self.metrics.observe, self.activity.observe))

    async def open_session(self, task: Task, receive: Receive, *, strict: bool) -> HttpSession:
        """Opens a session; leaves none, and raises `ClientDisconnected`, if its client leaves or abandons it first."""
        session: GatewaySession | None = None

        async def begin() -> None:
            nonlocal session
            session = await self.gateway.begin(task)

        with anyio.CancelScope() as opening, suppress(ClientDisconnected):
            self._openings[opening] = task.session_id
            try:
                await self.disconnects.cancel_on_disconnect(receive, opening.cancel, begin)
            finally:
                del self._openings[opening]
        if session is None:
            raise ClientDisconnected
        if opening.cancel_called or await has_left(receive):
            await session.close(is_abandoned=True)
            raise ClientDisconnected
        schemas = {spec.name: spec.parameters for spec in session.specs} if strict else {}
        http_session = HttpSession(session, schemas, is_strict=strict)
        self.sessions[session.id] = http_session
        session.stack.callback(self._forget, session.id)
        return http_session

    def cancel_opening(self, id: str) -> bool:
        """Ends the opening of a session with this id, if there is one."""
        found = [opening for opening, opened_id in self._openings.items() if opened_id == id]
        for opening in found:
            opening.cancel()
        return bool(found)

    def find_session(self, id: str, *, is_closing: bool = False) -> HttpSession:
        """The open session with this id, or one that is closing; raises the 404 problem if there is none."""
        http_session = self.sessions.get(id)
        if http_session is None or (http_session.session.closed and not is_closing):
            raise session_not_found()
        return http_session

    def _forget(self, id: str) -> None:
        if (closed := self.sessions.pop(id).closed) is not None:
            closed.set()

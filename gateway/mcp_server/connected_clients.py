"""Clients that keep a session over HTTP (versions before 2026): bounded in number, and one request per id at a time.

The SDK keeps each session until its client ends it, and leaves the stream of a request open for ever when another
request of the session comes with its id. One session takes about 35 KiB.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from mcp.server.context import CallNext
from mcp.server.streamable_http import GET_STREAM_KEY
from mcp.shared.dispatcher import coerce_request_id
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.bounded_json import SMALL_LENGTH
from gateway.http.exchange import Response
from gateway.large_json import run_beside
from gateway.mcp_server.client_context import RequestContext
from gateway.wire import dumps

MAX_CLIENTS = 20_000
"""Sessions that are kept at a time; beyond that, one makes room: the longest idle of the peer that has most."""
IDLE_S = 4 * 3600.0
"""How long a session is kept without a request. Long, because much time may pass between two calls of a rollout."""
UNUSED_S = 300.0
"""The same for a session that was opened, and in which nothing was asked for."""
SWEEP_S = 15.0
_VERSIONS = frozenset(version.encode() for version in MODERN_PROTOCOL_VERSIONS)
_SESSION = b"mcp-session-id"
_OPEN_REQUEST = "mtrl.open_request"
"""The key in an ASGI scope under which a request's `_OpenRequest` travels."""


@dataclass(eq=False, slots=True)
class _Client:
    """One session. A request holds it; what nobody holds may be ended."""

    id: bytes
    peer: str
    used_at: float
    is_used: bool = False
    holders: int = 0
    requests: dict[str, _OpenRequest] = field(default_factory=dict)
    """Those under way, by id."""

    def has_expired(self, now: float) -> bool:
        return not self.holders and now - self.used_at > (IDLE_S if self.is_used else UNUSED_S)


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request under way: its id is free again when both its stream and its handler have ended."""

    client: _Client
    id: str
    has_stream: bool = True
    has_handler: bool = False

    def note(self, *, has_stream: bool | None = None, has_handler: bool | None = None) -> None:
        self.has_stream = self.has_stream if has_stream is None else has_stream
        self.has_handler = self.has_handler if has_handler is None else has_handler
        if not self.has_stream and not self.has_handler and self.client.requests.get(self.id) is self:
            del self.client.requests[self.id]


async def hold_id(ctx: RequestContext, call_next: CallNext) -> Any:
    """Middleware of the SDK's server: a request's id is taken while its handler runs, even if its client has left."""
    held: _OpenRequest | None = ctx.request.scope.get(_OPEN_REQUEST) if ctx.request is not None else None
    if held is None:
        return await call_next(ctx)
    held.note(has_handler=True)
    try:
        return await call_next(ctx)
    finally:
        held.note(has_handler=False)


class ConnectedClients:
    """The ASGI application in front of the SDK's; `run` must be running as a task."""

    def __init__(self, app: ASGIApp, body_bytes: int) -> None:
        self._app, self._body_bytes = app, body_bytes
        self._clients: dict[bytes, _Client] = {}
        self._by_peer: dict[str, OrderedDict[bytes, _Client]] = {}
        """The sessions of each peer, the longest unused first."""

    async def run(self) -> None:
        """Ends expired sessions from time to time."""
        while True:
            await anyio.sleep(SWEEP_S)
            now = anyio.current_time()
            for client in [client for client in self._clients.values() if client.has_expired(now)]:
                await self._end(client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = version = None
        for name, value in scope["headers"]:
            if name == _SESSION and session is None:
                session = value
            elif name == b"mcp-protocol-version" and version is None:
                version = value
        if version in _VERSIONS:
            await self._app(scope, receive, send)
        elif session is None:
            await self._open(scope, receive, send)
        elif (client := self._clients.get(session)) is None:
            await self._app(scope, receive, send)
        else:
            await self._serve(client, scope, receive, send)

    async def _open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request that may open a session."""
        peer = str((scope.get("client") or ("",))[0])
        if len(self._clients) >= MAX_CLIENTS and not await self._make_room():
            await _refuse("Too many open sessions", 503, INTERNAL_ERROR)(scope, receive, send)
            return
        client: _Client | None = None

        async def note_session(message: Message) -> None:
            nonlocal client
            if message["type"] == "http.response.start" and message["status"] < 400:
                for name, value in message["headers"]:
                    if name.lower() == _SESSION:
                        client = self._clients[value] = _Client(value, peer, anyio.current_time(), holders=1)
                        self._by_peer.setdefault(peer, OrderedDict())[value] = client
            await send(message)

        try:
            await self._app(scope, receive, note_session)
        finally:
            if client is not None:
                client.holders -= 1

    async def _serve(self, client: _Client, scope: Scope, receive: Receive, send: Send) -> None:
        client.holders += 1
        client.used_at = anyio.current_time()
        with suppress(KeyError):
            self._by_peer[client.peer].move_to_end(client.id)
        try:
            if scope["method"] == "POST":
                await self._serve_post(client, scope, receive, send)
                return
            await self._app(scope, receive, send)
            if scope["method"] == "DELETE":
                self._forget(client)
        finally:
            client.holders -= 1
            client.used_at = anyio.current_time()

    async def _serve_post(self, client: _Client, scope: Scope, receive: Receive, send: Send) -> None:
        body, messages = bytearray(), []
        while len(body) <= self._body_bytes:
            messages.append(await receive())
            body += messages[-1].get("body", b"")
            if not messages[-1].get("more_body"):
                break
        try:
            request = await run_beside(from_json, bytes(body)) if len(body) > SMALL_LENGTH else from_json(bytes(body))
        except ValueError:
            request = None  # the SDK says what is wrong with it
        match request:
            case {"method": str(), "id": str() | int() as id} if not isinstance(id, bool):
                client.is_used, key = True, str(coerce_request_id(id))
            case _:
                await self._app(scope, replay(messages, receive), send)
                return
        if key in client.requests or key == GET_STREAM_KEY:
            text = "A request with this id is under way in this session; ids are used once"
            await _refuse(text, 400, INVALID_REQUEST)(scope, receive, send)
            return
        held = client.requests[key] = _OpenRequest(client, key)

        async def send_and_free(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                held.note(has_stream=False)  # first: the next request may come before this returns
            await send(message)

        try:
            await self._app({**scope, _OPEN_REQUEST: held}, replay(messages, receive), send_and_free)
        finally:
            held.note(has_stream=False)

    async def _make_room(self) -> bool:
        """Ends the longest idle session of the peer that has most; whether there was one."""
        for clients in sorted(self._by_peer.values(), key=len, reverse=True):
            idle = [client for client in clients.values() if not client.holders]
            if idle:
                await self._end(min(idle, key=lambda client: client.is_used))
                return True
        return False

    async def _end(self, client: _Client) -> None:
        """Ends a session as its client would."""
        self._forget(client)
        scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b"", "headers": []}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            """Nobody reads the answer."""

        await self._app({**scope, "headers": [(_SESSION, client.id)]}, receive, send)

    def _forget(self, client: _Client) -> None:
        self._clients.pop(client.id, None)
        clients = self._by_peer.get(client.peer, OrderedDict())
        clients.pop(client.id, None)
        if not clients:
            self._by_peer.pop(client.peer, None)


def replay(messages: list[Message], receive: Receive) -> Receive:
    """`receive` with messages that were already received before all others."""

    async def replayed() -> Message:
        return messages.pop(0) if messages else await receive()

    return replayed


def _refuse(message: str, status: int, code: int) -> Response:
    """A JSON-RPC error without an id, so that nobody takes it for the answer of the request that has the id."""
    error = {"code": code, "message": message}
    return Response(dumps({"jsonrpc": "2.0", "id": None, "error": error}), status)

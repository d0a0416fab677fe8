"""Streamable HTTP: every request is a post of its own, and its failure is nobody else's.

The SDK's client ends all calls of a connection when one post cannot connect, and closes the TCP connection after
each streamed answer; it also leaves generators behind that trio rightly complains of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
from anyio.abc import TaskGroup
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import CONNECTION_CLOSED, JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from gateway.types import ALONE
from gateway.upstream.fault import Flight, flight_now
from gateway.upstream.frames import failure, frame, messages
from gateway.upstream.inbox import Inbox, Slot, inbox
from gateway.upstream.lines import Events
from gateway.upstream.web import body, consume, exchange, note

SESSION = "mcp-session-id"
_ACCEPTED = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_TOLD_S = 10.0
"""For a message that is no request."""
_FAREWELL_S = 1.0
_PAUSES_S = (1.0, 30.0)
_MOST_RESUMPTIONS = 5


@asynccontextmanager
async def streamable_client(
    url: str, client: httpx2.AsyncClient, headers: Mapping[str, str], most_bytes: int
) -> AsyncIterator[tuple[Inbox, Posts]]:
    async with inbox(most_bytes) as (slot, read), anyio.create_task_group() as tasks:
        posts = Posts(url, client, headers, slot, tasks)
        try:
            yield read, posts
        finally:
            tasks.cancel_scope.cancel()
            with anyio.move_on_after(_FAREWELL_S, shield=True):
                await posts.farewell()


class Posts:
    """The writing end. Each request runs in a task of its own, which carries its sender's context."""

    def __init__(
        self, url: str, client: httpx2.AsyncClient, headers: Mapping[str, str], slot: Slot, tasks: TaskGroup
    ) -> None:
        self._url, self._client, self._slot, self._tasks = url, client, slot, tasks
        self._base = {**headers, **_ACCEPTED}
        self._session: str | None = None
        self._version: str | None = None
        self._under_way: dict[Any, anyio.CancelScope] = {}

    async def send(self, item: SessionMessage, /) -> None:
        message, metadata = item.message, item.metadata
        more = metadata.headers if isinstance(metadata, ClientMessageMetadata) else None
        if isinstance(message, JSONRPCRequest):
            if message.method == "initialize":
                self._version = None
            headers = self._headers(more)
            scope = self._under_way[message.id] = anyio.CancelScope()
            self._tasks.start_soon(self._ask, message, headers, scope)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._tasks.start_soon(self._cancel, message, self._headers(more))
        else:
            await self._tell(message, self._headers(more))
            if isinstance(message, JSONRPCNotification) and message.method == "notifications/initialized":
                self._tasks.start_soon(self._listen)

    def _headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        headers = {**self._base, **(more or {})}
        self._version = headers.get(MCP_PROTOCOL_VERSION_HEADER, self._version)
        if self._version is not None:
            headers[MCP_PROTOCOL_VERSION_HEADER] = self._version
        if self._session is not None:
            headers[SESSION] = self._session
        return headers

    async def _ask(self, message: JSONRPCRequest, headers: dict[str, str], scope: anyio.CancelScope) -> None:
        flight = flight_now.get() or Flight(ALONE)
        flight.sent = True
        problem: str | None = None
        try:
            with scope:
                async with exchange(self._client, "POST", self._url, headers, frame(message)) as response:
                    problem = await self._answer(message, response, flight)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            problem = note(flight, error, httpx2.URL(self._url))
        finally:
            self._under_way.pop(message.id, None)
        if problem is not None:
            await self._slot.put(failure(message.id, problem))

    async def _answer(self, message: JSONRPCRequest, response: httpx2.Response, flight: Flight) -> str | None:
        """Delivers the answer; otherwise says what came instead."""
        flight.status, flight.challenge = response.status_code, response.headers.get("www-authenticate")
        kind = response.headers.get("content-type", "").lower()
        if response.status_code >= 300:
            return await self._refusal(message, response, flight)
        if message.method == "initialize":
            self._session = response.headers.get(SESSION)
        if kind.startswith("text/event-stream"):
            return await self._follow(message, response, flight)
        data = await body(response, self._slot.most_bytes)
        if data is None:
            return self._slot.too_large
        answered = await self._slot.put_frame(data, message.id)
        return None if answered else f"the server's answer is not JSON-RPC (HTTP {response.status_code}, {kind})"

    async def _refusal(self, message: JSONRPCRequest, response: httpx2.Response, flight: Flight) -> str | None:
        """A server may say in JSON-RPC why it refuses; otherwise its status must do."""
        status = response.status_code
        data = await body(response, self._slot.most_bytes) or b""
        said = next((one for one in messages(data) if isinstance(one, JSONRPCError)), None)
        lost = status == 404 or (status == 400 and said is not None and said.error.code == CONNECTION_CLOSED)
        flight.session_lost = lost and SESSION in response.request.headers
        if said is not None:
            await self._slot.put(failure(message.id, said.error.message, said.error.code, said.error.data))
            return None
        if status in (500, 502, 504):
            flight.broken = f"HTTP {status}"
        else:
            place = response.headers.get("location", "").partition("?")[0]
            flight.refused = f"HTTP {status}, a redirect to {place}" if place else f"HTTP {status}"
        return f"HTTP {status}"

    async def _follow(self, message: JSONRPCRequest, response: httpx2.Response, flight: Flight) -> str | None:
        """Reads a streamed answer, over several streams where the server says how to go on."""
        events = Events(self._slot.most_bytes)
        if await self._read(response, events, message.id):
            return None
        for _ in range(_MOST_RESUMPTIONS):
            if not events.last_id or self._version in MODERN_PROTOCOL_VERSIONS:
                break
            await anyio.sleep(min(events.retry_s or _PAUSES_S[0], _PAUSES_S[1]))
            async with exchange(self._client, "GET", self._url, self._resuming(events)) as more:
                if more.status_code >= 300 or await self._read(more, events, message.id):
                    return None if more.status_code < 300 else self._lost(flight, f"HTTP {more.status_code}")
        return self._lost(flight, "the stream of the answer ended without an answer")

    def _lost(self, flight: Flight, reason: str) -> str:
        flight.broken = reason
        return reason

    def _resuming(self, events: Events) -> dict[str, str]:
        last = {"last-event-id": events.last_id} if events.last_id else {}
        return {**self._headers(), "accept": "text/event-stream", **last}

    async def _read(self, response: httpx2.Response, events: Events, asked: str | int | None) -> bool:
        """Whether the answer came."""
        answered = False

        async def take(chunk: bytes) -> bool:
            nonlocal answered
            for event in events.feed(chunk):
                answered = await self._slot.put_event(event, asked) or answered
            return answered

        try:
            await consume(response, take)
        except (httpx2.TransportError, httpx2.StreamError):
            # An answer that has come is no less one; without it, the caller decides what the loss means.
            if not answered and not events.last_id:
                raise
        return answered

    async def _cancel(self, message: JSONRPCNotification, headers: dict[str, str]) -> None:
        """Since 2026 the end of its own post is what cancels a request; before, it is told, then let go."""
        if self._version not in MODERN_PROTOCOL_VERSIONS:
            await self._tell(message, headers)
        scope = self._under_way.get((message.params or {}).get("requestId"))
        if scope is not None:
            scope.cancel()

    async def _tell(self, message: JSONRPCMessage, headers: dict[str, str]) -> None:
        """Nobody waits for an answer to it, and its loss shows in the next request."""
        try:
            with anyio.move_on_after(_TOLD_S):
                async with exchange(self._client, "POST", self._url, headers, frame(message)) as response:
                    await body(response, self._slot.most_bytes)
        except (httpx2.TransportError, httpx2.StreamError):
            return

    async def _listen(self) -> None:
        """What the server says of its own accord, as long as it offers a stream for that."""
        events, pause_s = Events(self._slot.most_bytes), _PAUSES_S[0]
        while self._session is not None:
            try:
                async with exchange(self._client, "GET", self._url, self._resuming(events)) as response:
                    if response.status_code >= 300:
                        return
                    await self._read(response, events, None)
                    pause_s = _PAUSES_S[0]
            except (httpx2.TransportError, httpx2.StreamError):
                pause_s = min(2 * pause_s, _PAUSES_S[1])
            await anyio.sleep(events.retry_s or pause_s)

    async def farewell(self) -> None:
        """Lets the server forget the session at once."""
        if self._session is not None:
            try:
                async with exchange(self._client, "DELETE", self._url, self._headers()) as response:
                    await body(response, self._slot.most_bytes)
            except (httpx2.TransportError, httpx2.StreamError):
                return

    async def aclose(self) -> None:
        """The requests under way end with their connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

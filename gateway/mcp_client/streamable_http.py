"""The streamable HTTP transport: every request is a POST of its own and fails on its own.

The SDK's client instead ends all calls of a connection when one POST cannot connect, and closes the TCP
connection after each streamed answer.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types import (
    CONNECTION_CLOSED,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from gateway.mcp_client.errors import PendingRequest, current_request
from gateway.mcp_client.flood_limits import MAX_OPEN_ANSWERS, Pacer, StreamFlood
from gateway.mcp_client.framing import EventParser, Inbox
from gateway.mcp_client.http_client import (
    AuthorizedClient,
    describe_encoding,
    open_response,
    read_body,
    read_chunks,
    record_failure,
    record_status,
)
from gateway.mcp_client.messages import UnreadableMessageError, error_response, find_mistake, read_messages, serialize
from gateway.types import DEFAULT_CONTEXT

SESSION_HEADER = "mcp-session-id"
_POST_HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_NOTIFY_S = 10.0
"""Timeout of messages that are not requests."""
_DELETE_S = 1.0
_RETRY_DELAYS_S = (1.0, 30.0)
_MAX_RESUMPTIONS = 5
_MAX_SESSION_ID_CHARS = 4096
_SESSION_ID = re.compile(rf"[\x21-\x7e]{{1,{_MAX_SESSION_ID_CHARS}}}")


@asynccontextmanager
async def streamable_client(
    url: str, client: AuthorizedClient, headers: Mapping[str, str], inbox: Inbox
) -> AsyncIterator[StreamableHttpWriter]:
    """Opens the transport; yields its writing end, and ends the session at the end."""
    async with anyio.create_task_group() as tasks:
        writer = StreamableHttpWriter(url, client, headers, inbox, tasks)
        try:
            yield writer
        finally:
            tasks.cancel_scope.cancel()
            with anyio.move_on_after(_DELETE_S, shield=True):
                await writer.delete_session()


class StreamableHttpWriter:
    """The writing end. Each request runs in a task of its own, which inherits its sender's context."""

    def __init__(
        self, url: str, client: AuthorizedClient, headers: Mapping[str, str], inbox: Inbox, tasks: TaskGroup
    ) -> None:
        self._url, self._client, self._inbox, self._tasks = url, client, inbox, tasks
        self._base_headers = {**headers, **_POST_HEADERS}
        self._session: str | None = None
        self._version: str | None = None
        self._scopes: dict[Any, anyio.CancelScope] = {}
        self._open_answers = 0

    async def send(self, message: JSONRPCMessage, extra: Mapping[str, str]) -> None:
        if isinstance(message, JSONRPCRequest) and message.method == "initialize":
            self._version = None
        headers = self._headers(extra)
        if isinstance(message, JSONRPCRequest):
            scope = self._scopes[message.id] = anyio.CancelScope()
            self._tasks.start_soon(self._post_request, message, headers, scope)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._tasks.start_soon(self._cancel, message, headers)
        elif not isinstance(message, JSONRPCNotification):
            await self._post_answer(message, headers)
        else:
            await self._post_message(message, headers)
            if message.method == "notifications/initialized":
                self._tasks.start_soon(self._listen)

    async def _post_answer(self, message: JSONRPCMessage, headers: dict[str, str]) -> None:
        """Posts an answer; those to a server that asks without end and takes none are dropped."""
        if self._open_answers < MAX_OPEN_ANSWERS:
            self._open_answers += 1
            try:
                await self._post_message(message, headers)
            finally:
                self._open_answers -= 1

    def _headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        headers = {**self._base_headers, **(extra or {})}
        self._version = headers.get(MCP_PROTOCOL_VERSION_HEADER, self._version)
        if self._version is not None:
            headers[MCP_PROTOCOL_VERSION_HEADER] = self._version
        if self._session is not None:
            headers[SESSION_HEADER] = self._session
        return headers

    async def _post_request(self, message: JSONRPCRequest, headers: dict[str, str], scope: anyio.CancelScope) -> None:
        pending = current_request.get() or PendingRequest(DEFAULT_CONTEXT)
        pending.sent = True
        problem: str | None = None
        try:
            with scope:
                async with open_response(self._client, "POST", self._url, headers, serialize(message)) as response:
                    problem = await self._read_response(message, response, pending)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            problem = record_failure(pending, error, httpx2.URL(self._url))
        finally:
            self._scopes.pop(message.id, None)
        if problem is not None:
            await self._inbox.dispatcher.receive(error_response(message.id, problem))

    async def _read_response(
        self, message: JSONRPCRequest, response: httpx2.Response, pending: PendingRequest
    ) -> str | None:
        """Puts the answer into the inbox; otherwise returns the problem."""
        record_status(pending, response)
        content_type = response.headers.get("content-type", "").lower()
        if response.status_code >= 300:
            return await self._handle_error_status(message, response, pending)
        if message.method == "initialize":
            session = response.headers.get(SESSION_HEADER)
            if session is not None and _SESSION_ID.fullmatch(session) is None:
                return f"the server's session id is not visible ASCII of at most {_MAX_SESSION_ID_CHARS} characters"
            self._session = session
        if (problem := describe_encoding(response)) is not None:
            return problem
        if content_type.startswith("text/event-stream"):
            return await self._read_streamed_answer(message, response, pending)
        data = await read_body(response, self._inbox.max_bytes)
        if data is None:
            return self._inbox.too_large_message
        try:
            messages = await read_messages(data, self._inbox.max_values)
        except UnreadableMessageError as error:
            return str(error)
        if await self._inbox.put_all(messages, message.id):
            return None
        mistake = find_mistake(data) or f"HTTP {response.status_code}, {content_type}"
        if any(isinstance(parsed, JSONRPCResponse | JSONRPCError) for parsed in messages):
            mistake = self._inbox.dispatcher.unreadable
        return f"the server's answer is not JSON-RPC for this request ({mistake})"

    async def _handle_error_status(
        self, message: JSONRPCRequest, response: httpx2.Response, pending: PendingRequest
    ) -> str | None:
        """Handles a status of 300 or more: passes on a JSON-RPC error in the body, else returns the status."""
        status = response.status_code
        data = await read_body(response, self._inbox.max_bytes) or b""
        try:
            messages = await read_messages(data)
        except UnreadableMessageError:
            messages = []
        refusal = next((parsed for parsed in messages if isinstance(parsed, JSONRPCError)), None)
        lost = status == 404 or (status == 400 and refusal is not None and refusal.error.code == CONNECTION_CLOSED)
        pending.session_lost = lost and SESSION_HEADER in response.request.headers
        if refusal is not None:
            error = refusal.error
            await self._inbox.dispatcher.receive(error_response(message.id, error.message, error.code, error.data))
            return None
        if status in (500, 502, 504):
            pending.lost_reason = f"HTTP {status}"
        else:
            location = response.headers.get("location", "").partition("?")[0]
            pending.undelivered_reason = f"HTTP {status}, a redirect to {location}" if location else f"HTTP {status}"
        return f"HTTP {status}"

    async def _read_streamed_answer(
        self, message: JSONRPCRequest, response: httpx2.Response, pending: PendingRequest
    ) -> str | None:
        """Reads a streamed answer; resumes it on new streams if the server gave event ids."""
        events = EventParser(self._inbox.max_bytes)
        if await self._read_events(response, events, message.id):
            return None
        reason = "the stream of the answer ended without an answer"
        for _ in range(_MAX_RESUMPTIONS):
            if not events.last_id or self._version in MODERN_PROTOCOL_VERSIONS:
                break
            await anyio.sleep(min(events.retry_s or _RETRY_DELAYS_S[0], _RETRY_DELAYS_S[1]))
            async with open_response(self._client, "GET", self._url, self._resume_headers(events)) as resumed:
                if resumed.status_code >= 300:
                    reason = f"HTTP {resumed.status_code}"
                    break
                if await self._read_events(resumed, events, message.id):
                    return None
        pending.lost_reason = reason
        return reason

    def _resume_headers(self, events: EventParser) -> dict[str, str | bytes]:
        # Ids are UTF-8, which headers are not by default.
        last: dict[str, str | bytes] = {"last-event-id": events.last_id.encode()} if events.last_id else {}
        return {**self._headers(), "accept": "text/event-stream", **last}

    async def _read_events(self, response: httpx2.Response, events: EventParser, request_id: str | int | None) -> bool:
        """Reads events into the inbox; whether the answer to the request was among them."""
        is_answered, pacer = False, Pacer()

        async def on_chunk(chunk: bytes) -> bool:
            nonlocal is_answered
            self._inbox.dispatcher.is_reading = True
            async with aclosing(events.read(chunk, pacer)) as parsed:
                async for event in parsed:
                    is_answered = await self._inbox.put_event(event, request_id) or is_answered
            self._inbox.dispatcher.is_reading = False
            return is_answered

        try:
            await read_chunks(response, on_chunk)
        except StreamFlood:
            if not is_answered:
                raise
        except (httpx2.TransportError, httpx2.StreamError):
            # An error after the answer does not matter. With an event id, the caller can still resume.
            if not is_answered and not events.last_id:
                raise
        return is_answered

    async def _cancel(self, message: JSONRPCNotification, headers: dict[str, str]) -> None:
        """Cancels a request: modern versions only close its POST, older ones also send the notification."""
        if self._version not in MODERN_PROTOCOL_VERSIONS:
            await self._post_message(message, headers)
        scope = self._scopes.get((message.params or {}).get("requestId"))
        if scope is not None:
            scope.cancel()

    async def _post_message(self, message: JSONRPCMessage, headers: dict[str, str]) -> None:
        """Posts a message that has no answer; a failure is ignored and will show in the next request."""
        try:
            with anyio.move_on_after(_NOTIFY_S):
                async with open_response(self._client, "POST", self._url, headers, serialize(message)) as response:
                    await read_body(response, self._inbox.max_bytes)
        except (httpx2.TransportError, httpx2.StreamError):
            return

    async def _listen(self) -> None:
        """Reads the server's own messages, as long as it offers a stream for them."""
        events, delay_s = EventParser(self._inbox.max_bytes), _RETRY_DELAYS_S[0]
        while self._session is not None:
            opened_at = anyio.current_time()
            try:
                async with open_response(self._client, "GET", self._url, self._resume_headers(events)) as response:
                    if response.status_code >= 300:
                        return
                    await self._read_events(response, events, None)
            except (httpx2.TransportError, httpx2.StreamError):
                pass
            has_lasted = anyio.current_time() - opened_at > delay_s
            delay_s = _RETRY_DELAYS_S[0] if has_lasted else min(2 * delay_s, _RETRY_DELAYS_S[1])
            await anyio.sleep(max(events.retry_s or 0, delay_s))

    async def delete_session(self) -> None:
        """Tells the server to end the session."""
        if self._session is not None:
            try:
                async with open_response(self._client, "DELETE", self._url, self._headers()) as response:
                    await read_body(response, self._inbox.max_bytes)
            except (httpx2.TransportError, httpx2.StreamError):
                return

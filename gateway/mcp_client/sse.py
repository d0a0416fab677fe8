"""The older HTTP+SSE transport: one event stream to read from, and a POST for every message sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urljoin

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus
from mcp_types import JSONRPCMessage, JSONRPCNotification, JSONRPCRequest

from gateway.mcp_client.errors import PendingRequest, current_request
from gateway.mcp_client.flood_limits import MAX_OPEN_ANSWERS, Pacer
from gateway.mcp_client.framing import EventParser, Inbox, OversizedLine, ServerSentEvent
from gateway.mcp_client.http_client import (
    AuthorizedClient,
    describe_encoding,
    open_response,
    read_body,
    read_chunks,
    record_failure,
    record_status,
)
from gateway.mcp_client.messages import error_response, serialize
from gateway.types import DEFAULT_CONTEXT

_POST_S = 60.0
"""Timeout of a POST; the answer itself comes over the stream."""


class SSEError(Exception):
    """The server does not follow this transport."""


@asynccontextmanager
async def sse_client(
    url: str, client: AuthorizedClient, headers: Mapping[str, str], inbox: Inbox
) -> AsyncIterator[SSEWriter]:
    """Opens the transport; yields its writing end."""
    async with anyio.create_task_group() as tasks:
        writer = SSEWriter(url, client, headers, inbox, tasks)
        await tasks.start(writer.read_stream)
        yield writer
        tasks.cancel_scope.cancel()


class SSEWriter:
    """The writing end, and the task that reads the stream. POSTs run concurrently, so a slow one delays no other."""

    def __init__(
        self, url: str, client: AuthorizedClient, headers: Mapping[str, str], inbox: Inbox, tasks: TaskGroup
    ) -> None:
        self._url, self._client, self._inbox, self._tasks = url, client, inbox, tasks
        self._base_headers = dict(headers)
        self._endpoint: str | None = None
        self._open_answers = 0

    async def read_stream(self, *, task_status: TaskStatus[None]) -> None:
        events, pacer = EventParser(self._inbox.max_bytes), Pacer()

        async def on_chunk(chunk: bytes) -> bool:
            self._inbox.dispatcher.is_reading = True
            async with aclosing(events.read(chunk, pacer)) as parsed:
                async for event in parsed:
                    await on_event(event)
            self._inbox.dispatcher.is_reading = False
            return False

        async def on_event(event: ServerSentEvent) -> None:
            is_endpoint = event.event_type == "endpoint" and self._endpoint is None
            if is_endpoint and not isinstance(event.data, OversizedLine):
                self._endpoint = _resolve_endpoint(self._url, event.data.decode("utf-8", "replace"))
                task_status.started()
            await self._inbox.put_event(event)

        pending = current_request.get()
        try:
            async with open_response(
                self._client, "GET", self._url, {**self._base_headers, "accept": "text/event-stream"}
            ) as response:
                if pending is not None:
                    record_status(pending, response)
                encoding, content_type = describe_encoding(response), response.headers.get("content-type", "no content")
                is_events = content_type.lower().startswith("text/event-stream")
                if response.status_code >= 300 or encoding or not is_events:
                    raise SSEError(f"HTTP {response.status_code}, {encoding or content_type}")
                await read_chunks(response, on_chunk)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            problem = record_failure(pending or PendingRequest(DEFAULT_CONTEXT), error, httpx2.URL(self._url))
            if self._endpoint is None:
                raise SSEError(problem) from error
            self._inbox.dispatcher.end(error)
        if self._endpoint is None:
            raise SSEError("the stream ended before it named an endpoint")
        self._inbox.dispatcher.end()

    async def send(self, message: JSONRPCMessage, headers: Mapping[str, str]) -> None:
        """Posts a message. Answers to a server that asks without end and takes none are dropped."""
        if isinstance(message, JSONRPCRequest | JSONRPCNotification):
            self._tasks.start_soon(self._post, message)
        elif self._open_answers < MAX_OPEN_ANSWERS:
            self._open_answers += 1
            self._tasks.start_soon(self._post_answer, message)

    async def _post_answer(self, message: JSONRPCMessage) -> None:
        try:
            await self._post(message)
        finally:
            self._open_answers -= 1

    async def _post(self, message: JSONRPCMessage) -> None:
        pending = current_request.get() or PendingRequest(DEFAULT_CONTEXT)
        if isinstance(message, JSONRPCRequest):
            pending.sent = True
        headers = {**self._base_headers, "content-type": "application/json"}
        problem: str | None = "the POST of the request timed out"
        try:
            with anyio.move_on_after(_POST_S):
                async with open_response(
                    self._client, "POST", self._endpoint or "", headers, serialize(message)
                ) as response:
                    await read_body(response, self._inbox.max_bytes)
                    problem = _record_refusal(response, pending) if response.status_code >= 300 else None
        except (httpx2.TransportError, httpx2.StreamError) as error:
            problem = record_failure(pending, error, httpx2.URL(self._url))
        if problem is not None and isinstance(message, JSONRPCRequest):
            await self._inbox.dispatcher.receive(error_response(message.id, problem))


def _record_refusal(response: httpx2.Response, pending: PendingRequest) -> str:
    record_status(pending, response)
    pending.session_lost = response.status_code == 404
    pending.undelivered_reason = f"HTTP {response.status_code}"
    return pending.undelivered_reason


def _resolve_endpoint(url: str, reference: str) -> str:
    """The URL for POSTs; raises if it is at another origin, which must not get our secrets."""
    base, endpoint = httpx2.URL(url), httpx2.URL(urljoin(url, reference))
    if (base.scheme, base.host, base.port) != (endpoint.scheme, endpoint.host, endpoint.port):
        raise SSEError(f"its endpoint is at another origin ({endpoint.host})")
    return str(endpoint)

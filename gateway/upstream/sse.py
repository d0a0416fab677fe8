"""The older HTTP transport: one stream to listen on, and a post for every message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import urljoin

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, JSONRPCRequest

from gateway.types import ALONE
from gateway.upstream.fault import Flight, flight_now
from gateway.upstream.frames import failure, frame
from gateway.upstream.inbox import Inbox, Slot, inbox
from gateway.upstream.lines import Events, TooLong
from gateway.upstream.web import body, consume, exchange, note

_TOLD_S = 60.0
"""For a post to be taken in; the answer itself comes over the stream."""


class SSEError(Exception):
    """The server does not speak this transport as it should."""


@asynccontextmanager
async def sse_client(
    url: str, client: httpx2.AsyncClient, headers: Mapping[str, str], most_bytes: int
) -> AsyncIterator[tuple[Inbox, Mail]]:
    async with inbox(most_bytes) as (slot, read), anyio.create_task_group() as tasks:
        mail = Mail(url, client, headers, slot, tasks)
        await tasks.start(mail.listen)
        yield read, mail
        tasks.cancel_scope.cancel()


class Mail:
    """The writing end, and the stream behind it. Posts run side by side, so that nobody waits behind a slow one."""

    def __init__(
        self, url: str, client: httpx2.AsyncClient, headers: Mapping[str, str], slot: Slot, tasks: TaskGroup
    ) -> None:
        self._url, self._client, self._slot, self._tasks = url, client, slot, tasks
        self._base = dict(headers)
        self._endpoint: str | None = None

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        events = Events(self._slot.most_bytes)

        async def take(chunk: bytes) -> bool:
            for event in events.feed(chunk):
                if event.kind == "endpoint" and self._endpoint is None and not isinstance(event.data, TooLong):
                    self._endpoint = _endpoint(self._url, event.data.decode("utf-8", "replace"))
                    task_status.started()
                await self._slot.put_event(event)
            return False

        flight = flight_now.get()
        try:
            async with exchange(self._client, "GET", self._url, {**self._base, "accept": "text/event-stream"}) as got:
                if flight is not None:
                    flight.status, flight.challenge = got.status_code, got.headers.get("www-authenticate")
                if got.status_code >= 300 or not _is_stream(got):
                    raise SSEError(f"HTTP {got.status_code}, {got.headers.get('content-type', 'no content')}")
                await consume(got, take)
        except (httpx2.TransportError, httpx2.StreamError) as error:
            words = note(flight or Flight(ALONE), error, httpx2.URL(self._url))
            if self._endpoint is None:
                raise SSEError(words) from error
            await self._slot.put(error)
        if self._endpoint is None:
            raise SSEError("the stream ended before it named an endpoint")
        await self._slot.close()

    async def send(self, item: SessionMessage, /) -> None:
        self._tasks.start_soon(self._post, item.message)

    async def _post(self, message: JSONRPCMessage) -> None:
        flight = flight_now.get() or Flight(ALONE)
        if isinstance(message, JSONRPCRequest):
            flight.sent = True
        headers = {**self._base, "content-type": "application/json"}
        problem: str | None = "the post of the request was not taken in"
        try:
            with anyio.move_on_after(_TOLD_S):
                async with exchange(self._client, "POST", self._endpoint or "", headers, frame(message)) as response:
                    await body(response, self._slot.most_bytes)
                    problem = _refused(response, flight) if response.status_code >= 300 else None
        except (httpx2.TransportError, httpx2.StreamError) as error:
            problem = note(flight, error, httpx2.URL(self._url))
        if problem is not None and isinstance(message, JSONRPCRequest):
            await self._slot.put(failure(message.id, problem))

    async def aclose(self) -> None:
        """The stream is what ends the session."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _refused(response: httpx2.Response, flight: Flight) -> str:
    flight.status, flight.challenge = response.status_code, response.headers.get("www-authenticate")
    flight.session_lost = response.status_code == 404
    flight.refused = f"HTTP {response.status_code}"
    return flight.refused


def _is_stream(response: httpx2.Response) -> bool:
    return bool(response.headers.get("content-type", "").lower().startswith("text/event-stream"))


def _endpoint(url: str, named: str) -> str:
    """A server may not send us, with our secrets, to another place."""
    here, there = httpx2.URL(url), httpx2.URL(urljoin(url, named))
    if (here.scheme, here.host, here.port) != (there.scheme, there.host, there.port):
        raise SSEError(f"its endpoint is at another origin ({there.host})")
    return str(there)

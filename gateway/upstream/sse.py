"""The older HTTP transport: one stream to listen on, and a post for every message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self
from urllib.parse import urljoin

import anyio
import httpx2
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared._httpx_utils import request_within_origin, sse_within_origin
from mcp.shared.message import SessionMessage

from gateway.upstream.fault import flight_now
from gateway.upstream.frames import messages


class SSEError(Exception):
    """The server does not speak this transport as it should."""


@asynccontextmanager
async def sse_client(
    url: str, client: httpx2.AsyncClient, most_bytes: int
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], Poster]]:
    """The SDK's own closes the client it is given, bounds events at 1 MB and dies of one refused post."""
    heard, read = anyio.create_memory_object_stream[SessionMessage | Exception](64)
    async with sse_within_origin(client, url, max_event_size=most_bytes) as events, heard, read:
        status = events.response.status_code
        if status >= 300:
            raise SSEError(f"HTTP {status}")
        async with anyio.create_task_group() as tasks:
            endpoint = await tasks.start(_listen, url, events, heard)
            yield read, Poster(client, endpoint)
            tasks.cancel_scope.cancel()


async def _listen(
    url: str,
    events: httpx2.EventSource,
    heard: MemoryObjectSendStream[SessionMessage | Exception],
    *,
    task_status: TaskStatus[str],
) -> None:
    known = False
    async with heard:
        try:
            async for event in events:
                if event.event == "endpoint" and not known:
                    known = True
                    task_status.started(_endpoint(url, event.data))
                elif event.event == "message":
                    for message in messages(event.data):
                        await heard.send(SessionMessage(message))
        except (httpx2.TransportError, httpx2.StreamError) as error:
            if not known:
                raise SSEError(str(error)) from error
            with anyio.move_on_after(1):
                await heard.send(error)
        if not known:
            raise SSEError("the stream ended before it named an endpoint")


def _endpoint(url: str, named: str) -> str:
    """A server may not send us, with our secrets, to another place."""
    here, there = httpx2.URL(url), httpx2.URL(urljoin(url, named))
    if (here.scheme, here.host, here.port) != (there.scheme, there.host, there.port):
        raise SSEError(f"its endpoint is at another origin ({there.host})")
    return str(there)


class Poster:
    """The writing end: posts in the sender's own task, so that nobody waits behind a slow one."""

    def __init__(self, client: httpx2.AsyncClient, endpoint: str) -> None:
        self._client, self._endpoint = client, endpoint

    async def send(self, item: SessionMessage, /) -> None:
        body = item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        response = await request_within_origin(self._client, "POST", self._endpoint, json=body)
        if response.status_code >= 300:
            flight = flight_now.get()
            if flight is not None and response.status_code == 404:
                flight.session_lost = True
            raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        """The listening stream is what ends the session."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

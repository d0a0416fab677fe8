"""HTTP connections are reused for later requests, and a dead one never is."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpcore2
import httpx2
from anyio.abc import SocketAttribute, SocketStream

from gateway.mcp_client.flood_limits import MeteredStream, WireMeter
from gateway.mcp_client.http_client import PooledTransport
from tests.waiting import PATIENCE_S

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class CountingServer:
    """Answers each request at once, or once `release` is set if there is one; counts requests and connections."""

    def __init__(self) -> None:
        self.streams: list[SocketStream] = []
        self.url = ""
        self.request_count = 0
        self.release: anyio.Event | None = None

    async def talk(self, stream: SocketStream) -> None:
        self.streams.append(stream)
        async with stream:
            try:
                while (await stream.receive()).endswith(b"\r\n\r\n"):
                    self.request_count += 1
                    if self.release is not None:
                        await self.release.wait()
                    await stream.send(ANSWER)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


@asynccontextmanager
async def connect_to_server() -> AsyncIterator[tuple[CountingServer, httpx2.AsyncClient]]:
    server = CountingServer()
    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, server.talk)
            server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/"
            client = httpx2.AsyncClient(
                transport=PooledTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), timeout=PATIENCE_S
            )
            yield server, client
            await client.aclose()
            tasks.cancel_scope.cancel()


async def test_concurrent_requests_use_own_connections_and_return_them() -> None:
    async with connect_to_server() as (server, client):
        server.release = anyio.Event()
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                before = server.request_count
                for _ in range(4):
                    tasks.start_soon(client.get, server.url)
                while server.request_count < before + 4:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                    await anyio.sleep(0.001)
                server.release.set()
            server.release = anyio.Event()
        assert len(server.streams) == 4


async def test_connection_closed_by_the_server_is_not_reused() -> None:
    async with connect_to_server() as (server, client):
        await client.get(server.url)
        await server.streams[0].aclose()
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == 2


async def test_connection_of_a_cancelled_request_is_not_reused() -> None:
    async with connect_to_server() as (server, client):
        server.release = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get, server.url)
            while not server.request_count:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        server.release.set()
        server.release = None
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == 2


class RecordingStream(httpcore2.AsyncNetworkStream):
    """Keeps what is written; a peer that has closed refuses it, and its answer can still be read."""

    def __init__(self, *, closed: bool = False) -> None:
        self.writes: list[bytes] = []
        self._closed = closed

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return b"answer"

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._closed:
            raise httpcore2.WriteError
        self.writes.append(bytes(buffer))


async def test_the_answer_of_a_server_that_stopped_reading_is_read() -> None:
    stream = MeteredStream(RecordingStream(closed=True), WireMeter())
    await stream.write(b"head")
    assert await stream.read(100) == b"answer"

"""HTTP connections are kept for the next call, and a dead one is never handed out."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
from anyio.abc import SocketAttribute, SocketStream

from gateway.upstream.spare import SpareTransport

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request at once, or when `hold` is set; counts its connections, and can drop them all."""

    def __init__(self) -> None:
        self.streams: list[SocketStream] = []
        self.url = ""
        self.asked = 0
        self.waiting: anyio.Event | None = None

    async def talk(self, stream: SocketStream) -> None:
        self.streams.append(stream)
        async with stream:
            try:
                while (await stream.receive()).endswith(b"\r\n\r\n"):
                    self.asked += 1
                    if self.waiting is not None:
                        await self.waiting.wait()
                    await stream.send(ANSWER)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


@asynccontextmanager
async def reached() -> AsyncIterator[tuple[Server, httpx2.AsyncClient]]:
    server = Server()
    with anyio.fail_after(10):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, server.talk)
            server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/"
            client = httpx2.AsyncClient(transport=SpareTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)))
            yield server, client
            await client.aclose()
            tasks.cancel_scope.cancel()


async def test_calls_one_after_another_share_a_connection() -> None:
    async with reached() as (server, client):
        for _ in range(3):
            assert (await client.get(server.url)).text == "ok"
        assert (server.asked, len(server.streams)) == (3, 1)


async def test_calls_at_once_have_connections_of_their_own_and_leave_them_to_others() -> None:
    async with reached() as (server, client):
        server.waiting = anyio.Event()
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                before = server.asked
                for _ in range(4):
                    tasks.start_soon(client.get, server.url)
                while server.asked < before + 4:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                    await anyio.sleep(0.001)
                server.waiting.set()
            server.waiting = anyio.Event()
        assert len(server.streams) == 4


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with reached() as (server, client):
        await client.get(server.url)
        await server.streams[0].aclose()
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == 2


async def test_a_cancelled_call_takes_its_connection_with_it() -> None:
    async with reached() as (server, client):
        server.waiting = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get, server.url)
            while not server.asked:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        server.waiting.set()
        server.waiting = None
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == 2

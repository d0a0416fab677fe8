"""HTTP connections are reused for later requests, and a dead one never is."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import anyio
import httpx2
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from gateway.mcp_client.http_client import PooledTransport, send_request
from gateway.mcp_client.http_connection import HttpConnection
from tests.waiting import PATIENCE_S

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class CountingServer:
    """Answers each request at once, or once `release` is set if there is one; counts requests and connections."""

    def __init__(self) -> None:
        self.streams: list[SocketStream] = []
        self.url = ""
        self.request_count = 0
        self.heads: list[bytes] = []
        self.answer = ANSWER
        self.release: anyio.Event | None = None

    async def talk(self, stream: SocketStream) -> None:
        self.streams.append(stream)
        async with stream:
            try:
                while (head := await stream.receive()).endswith(b"\r\n\r\n"):
                    self.request_count += 1
                    self.heads.append(head)
                    if self.release is not None:
                        await self.release.wait()
                    await stream.send(self.answer.removesuffix(b"\0"))
                    if not self.answer.endswith((b"ok", b"\n")) or self.answer.endswith(b"\0"):
                        return
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


class RefusingStream(ByteStream):
    """A peer that has stopped reading, and has answered before."""

    extra_attributes: ClassVar = {SocketAttribute.raw_socket: lambda: None}  # type: ignore[misc]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return ANSWER

    async def send(self, item: bytes) -> None:
        raise anyio.BrokenResourceError

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


async def test_the_answer_of_a_server_that_stopped_reading_is_read() -> None:
    connection = HttpConnection(RefusingStream())
    await connection.send(b"head")
    assert (connection.status, await anext(connection)) == (200, b"ok")


@pytest.mark.parametrize(
    ("answer", "text", "is_reused"),
    [
        (ANSWER, "ok", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + ANSWER, "ok", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\nA: b\r\n\r\n", "ok", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "", True),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: \t identity  \r\nContent-Length: 2\r\n\r\nok", "ok", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "ok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", False),
        (ANSWER + ANSWER, "ok", False),
        (ANSWER + b"and more", "ok", False),
        (b"HTTP/1.1 200 OK\r\n\r\nok\0", "ok", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\0", None, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", None, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok", None, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", None, False),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n", None, False),
        (b"HTTP/1.1 2", None, False),
        (b"hello\r\n\r\n", None, False),
        (b"\0", None, False),
    ],
    ids=str,
)
async def test_responses_are_read_as_http_says_and_spoiled_connections_are_not_reused(
    answer: bytes, text: str | None, is_reused: bool
) -> None:
    """A `\\0` at the end stands for the end of the connection."""
    async with connect_to_server() as (server, client):
        server.answer = answer
        if text is None:
            with pytest.raises(httpx2.TransportError):
                await client.get(server.url)
        else:
            assert (await client.get(server.url)).text == text
        server.answer = ANSWER
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == (1 if is_reused else 2)


@pytest.mark.parametrize("header", [("a", "b\r\nc: d"), ("a", "b\0"), ("a b", "c"), ("a:", "b"), ("", "b")])
async def test_a_header_that_http_cannot_express_is_not_sent(header: tuple[str, str]) -> None:
    async with connect_to_server() as (server, client):
        with pytest.raises(httpx2.LocalProtocolError):
            await client.get(server.url, headers=[header])
        assert not server.streams


async def test_a_proxy_gets_the_whole_address_of_a_plain_request_and_its_credentials() -> None:
    async with connect_to_server() as (server, _):
        proxy = server.url.replace("//", "//user:word@")
        transport = PooledTransport(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), proxy)
        response = await send_request(transport, "GET", httpx2.URL("http://far.test/mcp?a=b"), {}, None)
        await response.aclose()
        await transport.aclose()
    head = server.heads[0]
    assert head.startswith(b"GET http://far.test/mcp?a=b HTTP/1.1\r\nhost: far.test\r\n"), head
    assert b"\r\nProxy-Authorization: Basic dXNlcjp3b3Jk\r\n" in head

"""HTTP connections are reused for later requests, and a dead one never is."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.lowlevel
import httpx2
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from gateway.config.models import Server
from gateway.mcp_client.http_client import PooledTransport, send_request, send_within_origin
from gateway.mcp_client.http_connection import HttpConnection
from gateway.mcp_client.transport import Services
from tests.mcp_client.test_http_access import Certificates
from tests.waiting import PATIENCE_S

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class CountingServer:
    """Answers each request at once, or once `release` is set if there is one; counts requests and connections."""

    def __init__(self) -> None:
        self.streams: list[SocketStream] = []
        self.closed = anyio.Event()
        """Set when a client closes its connection."""
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
                self.closed.set()


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


async def test_connections_of_concurrent_requests_are_all_used_again() -> None:
    async with connect_to_server() as (server, client):
        for count in (4, 8):
            server.release = anyio.Event()
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(client.get, server.url)
                while server.request_count < count:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                    await anyio.sleep(0.001)
                server.release.set()
        assert len(server.streams) == 4


async def test_idle_connection_of_an_origin_that_is_never_used_again_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.mcp_client.http_client._KEEPALIVE_S", 0.01)
    async with connect_to_server() as (server, _), Services() as services:
        transport = await services.http_clients.for_server(Server(url=server.url))(server.url)
        request = send_request(transport, "GET", httpx2.URL(server.url), {}, None)
        async with aclosing(await request) as response:
            assert await response.aread() == b"ok"
        await server.closed.wait()


async def test_gateway_whose_task_is_cancelled_closes_its_connections() -> None:
    async def hold(url: str) -> None:
        async with Services() as services:
            transport = await services.http_clients.for_server(Server(url=url))(url)
            async with aclosing(await send_request(transport, "GET", httpx2.URL(url), {}, None)) as response:
                await response.aread()
            await anyio.sleep_forever()

    async with connect_to_server() as (server, _):
        task = asyncio.create_task(hold(server.url))
        while not server.request_count:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
            await anyio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await server.closed.wait()


async def test_gateway_that_ends_while_idle_connections_are_closed_closes_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.mcp_client.http_client._KEEPALIVE_S", 0.01)
    async with connect_to_server() as (server, _):
        async with Services() as services:
            transport = await services.http_clients.for_server(Server(url=server.url))(server.url)
            server.release = anyio.Event()

            async def ask() -> None:
                async with aclosing(await send_request(transport, "GET", httpx2.URL(server.url), {}, None)) as response:
                    await response.aread()

            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(ask)
                while server.request_count < 20:  # noqa: ASYNC110 - bounded above; the server is a loop of its own
                    await anyio.sleep(0.001)
                server.release.set()
            idle = next(iter(transport._idle.values()))
            while len(idle) == 20:
                await anyio.lowlevel.checkpoint()
        assert not idle


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
        (ANSWER + b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nok", "ok", False),
        (b"HTTP/1.1 199 Nearly\r\nContent-Length: 5\r\n\r\nhello" + ANSWER, "ok", True),
        (b"HTTP/1.1 200 OK\r\n\r\nok\0", "ok", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\0", None, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", None, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok", None, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", None, False),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n", None, False),
        (b"hello\r\n\r\n", None, False),
        (b"\0", None, False),
        (b"HTTP/1.1 000 Nothing\r\nContent-Length: 2\r\n\r\nok", "ok", True),
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
            response = await client.get(server.url)
            assert response.text == text and response.status_code in (0, 200, 204)
        server.answer = ANSWER
        assert (await client.get(server.url)).text == "ok"
        assert len(server.streams) == (1 if is_reused else 2)


async def test_what_comes_behind_a_response_of_a_whole_read_answers_no_other_request() -> None:
    """Of one segment, what is beyond a read of 4,096 bytes is not with the system any more."""
    async with connect_to_server() as (server, client):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 4055\r\n\r\n"
        body = b"x" * (4096 - len(head))
        assert len(body) == 4055
        server.answer = head + body + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged ok"
        assert (await client.get(server.url)).content == body
        server.answer = ANSWER
        assert (await client.get(server.url)).text == "ok"


async def test_a_redirect_to_no_address_is_the_response_and_its_connection_is_returned() -> None:
    async with connect_to_server() as (server, client):
        server.answer = b"HTTP/1.1 307 Moved\r\nLocation: //h:1:2/\r\nContent-Length: 2\r\n\r\nok"
        transport = client._transport
        for _ in range(2):
            response = await send_within_origin(transport, "GET", server.url, {}, None)
            assert response.status_code == 307 and await response.aread() == b"ok"
            await response.aclose()
        assert len(server.streams) == 1


async def test_the_last_of_too_many_redirects_is_the_response() -> None:
    async with connect_to_server() as (server, client):
        server.answer = b"HTTP/1.1 307 Moved\r\nLocation: /again\r\nContent-Length: 2\r\n\r\nok"
        response = await send_within_origin(client._transport, "GET", server.url, {}, None)
        assert response.status_code == 307 and await response.aread() == b"ok"
        await response.aclose()
        assert server.request_count == 3 and len(server.streams) == 1


async def test_a_length_that_is_configured_as_a_header_is_not_sent() -> None:
    async with connect_to_server() as (server, client):
        headers = {"Content-Length": "0", "Transfer-Encoding": "chunked"}
        response = await send_request(client._transport, "POST", httpx2.URL(server.url), headers, b"ab\r\n\r\n")
        await response.aclose()
    [head] = server.heads
    assert head.count(b"content-length: 6\r\n") == 1 and b"chunked" not in head


class TlsServer:
    """Answers over TLS; the bytes for the wire that an answer makes are changed by `spoil` before they leave."""

    def __init__(self, folder: Path) -> None:
        Certificates(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
        self.spoil: Callable[[ssl.SSLObject, ssl.MemoryBIO], bytes] = lambda tls, wire: wire.read()

    async def talk(self, stream: SocketStream) -> None:
        into, wire = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._context.wrap_bio(into, wire, server_side=True)
        is_open = False
        async with stream:
            async for data in stream:
                into.write(data)
                with suppress(ssl.SSLWantReadError):
                    if not is_open:
                        tls.do_handshake()
                        is_open = True
                    tls.read()
                    tls.write(ANSWER)
                    await stream.send(self.spoil(tls, wire))
                await stream.send(wire.read())


@asynccontextmanager
async def connect_over_tls(folder: Path) -> AsyncIterator[tuple[TlsServer, httpx2.AsyncClient, str]]:
    server = TlsServer(folder)
    with anyio.fail_after(PATIENCE_S):
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, server.talk)
            transport = PooledTransport(ssl.create_default_context(cafile=str(folder / "ca.pem")))
            async with httpx2.AsyncClient(transport=transport, timeout=PATIENCE_S) as client:
                yield server, client, f"https://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/"
            tasks.cancel_scope.cancel()


async def test_a_broken_record_of_tls_is_an_error_of_its_request_alone(tmp_path: Path) -> None:
    """As an error of TLS it ended all calls of the server."""
    async with connect_over_tls(tmp_path) as (server, client, url):
        assert (await client.get(url)).text == "ok"
        server.spoil = lambda tls, wire: wire.read() and b"\x17\x03\x03\x00\x20" + b"A" * 32
        with pytest.raises(httpx2.ReadError):
            await client.get(url)


async def test_a_further_record_of_tls_answers_no_other_request(tmp_path: Path) -> None:
    def add_forged(tls: ssl.SSLObject, wire: ssl.MemoryBIO) -> bytes:
        tls.write(ANSWER.replace(b"ok", b"no"))
        return wire.read()

    async with connect_over_tls(tmp_path) as (server, client, url):
        server.spoil = add_forged
        assert (await client.get(url)).text == "ok"
        server.spoil = lambda tls, wire: wire.read()
        assert (await client.get(url)).text == "ok"


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

"""A list of hosts as the network of a sandbox: these are reached through the proxy, and no trick reaches others."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from gateway.sandbox import host_proxy
from gateway.toolset import Session
from gateway.types import Outcome
from tests.sandbox.conftest import SMALL, call, open_session

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
OPENED = (
    "import urllib.request, urllib.error\ndef get(url, **k):\n try: return urllib.request.urlopen(url, **k).read()\n"
)
GET = OPENED + " except urllib.error.HTTPError as error: return error.read()\nprint(get('{url}'))"
RAW = (
    "import socket\ns = socket.create_connection(('127.0.0.1', 3128))\ns.sendall({data!r})\n"
    "got = b''\nwhile chunk := s.recv(65536): got += chunk\nprint(got)"
)


class Server:
    """A server outside; it records what it receives and answers each connection once."""

    def __init__(self) -> None:
        self.port, self.received = 0, list[bytes]()

    async def answer(self, client: SocketStream) -> None:
        async with client:
            data = await client.receive()
            with anyio.move_on_after(0.3):  # What a trick would have passed on comes with the first bytes, or never.
                while True:
                    data += await client.receive()
            self.received.append(data)
            await client.send(ANSWER)


@asynccontextmanager
async def open_server() -> AsyncIterator[Server]:
    server = Server()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        server.port = listener.extra(SocketAttribute.local_port)

        async def answer(client: SocketStream) -> None:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await server.answer(client)

        tasks.start_soon(listener.serve, answer)
        yield server
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_boxed(*hosts: str, **settings: Any) -> AsyncIterator[Session]:
    async with open_session(SMALL.model_copy(update={"network": hosts, **settings})) as session:
        yield session


async def test_hosts_of_the_list_are_reached_and_others_are_refused_and_told() -> None:
    async with open_server() as server, open_boxed(f"127.0.0.1:{server.port}") as session:
        assert f"127.0.0.1:{server.port}" in session.specs[0].description
        reached = await call(session, "python", code=GET.format(url=f"http://127.0.0.1:{server.port}/x"))
        assert reached.text == "b'hello'" and reached.metrics == {}, reached
        refused = await call(session, "python", code=GET.format(url="http://evil.example/"))
        assert "evil.example:80 is not in the list of hosts" in refused.parts[0].text  # type: ignore[union-attr]
        assert (
            refused.parts[-1].text == "[The network of this tool refused: evil.example:80 is not in the list of hosts]"
        )  # type: ignore[union-attr]
        assert refused.metrics == {"network_refused": 1} and refused.outcome is Outcome.OK
        assert (await call(session, "python", code="1 + 1")).text == "2"
    assert [line.split(b"\r\n")[0] for line in server.received] == [b"GET /x HTTP/1.1"]


TRICKS = {
    "a tunnel to another port": (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n\r\n", "403 Forbidden"),
    "another way to write the address": (b"CONNECT 2130706433:%d HTTP/1.1\r\n\r\n", "403 Forbidden"),
    "an address within another": (b"CONNECT [::ffff:127.0.0.1]:%d HTTP/1.1\r\n\r\n", "403 Forbidden"),
    "the service of a cloud": (b"GET http://169.254.169.254/latest HTTP/1.1\r\n\r\n", "403 Forbidden"),
    "a header without end": (b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nA: " + b"x" * 40_000, "400 Bad Request"),
    "two lengths": (b"GET http://127.0.0.1:%d/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\n", "400 Bad"),
}


async def test_tricks_with_requests_reach_nothing() -> None:
    async with open_server() as server, open_boxed(f"127.0.0.1:{server.port}") as session:
        for name, (data, status) in TRICKS.items():
            line = data.replace(b"%d", str(server.port).encode())
            result = await call(session, "python", code=RAW.format(data=line))
            assert status in result.text, (name, result)
    assert server.received == []


async def test_server_sees_the_named_host_and_one_request_only() -> None:
    async with open_server() as server, open_boxed(f"127.0.0.1:{server.port}") as session:
        own = "Host: evil\r\nProxy-Authorization: evil\r\nUpgrade: evil"
        base = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\n{own}\r\nContent-Length: 2\r\n\r\nok"
        await call(
            session, "python", code=RAW.format(data=base.encode() + b"GET /smuggled HTTP/1.1\r\nHost: evil\r\n\r\n")
        )
    (received,) = server.received
    assert b"smuggled" not in received and b"evil" not in received and received.endswith(b"\r\n\r\nok")


async def test_name_that_leads_to_this_machine_is_refused_however_often_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names are resolved once, and the address that was checked is the one that is connected to."""
    answers, connected = iter(["8.8.8.8", "127.0.0.1", "127.0.0.1"]), []

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    async def connect(address: str, port: int) -> SocketStream:
        connected.append(address)
        raise OSError("not reached")

    monkeypatch.setattr(host_proxy.anyio, "getaddrinfo", resolve)
    monkeypatch.setattr(host_proxy.anyio, "connect_tcp", connect)
    async with open_boxed("rebind.example") as session:
        first = await call(session, "python", code=GET.format(url="http://rebind.example/"))
        second = await call(session, "python", code=GET.format(url="http://rebind.example/"))
    assert "cannot be connected to" in first.text and connected == ["8.8.8.8"]
    assert "leads to an address that is not of the Internet" in second.text


async def test_nothing_else_of_the_machine_is_reached() -> None:
    async with open_server() as server, open_boxed("pypi.org") as session:
        direct = await call(
            session, "python", code=f"import socket; socket.create_connection(('127.0.0.1', {server.port}))"
        )
        assert "ConnectionRefused" in str(direct.reason)
        code = "import socket; socket.socket(socket.AF_UNIX).connect('/run/mtrl-proxy')"
        assert str((await call(session, "python", code=code)).reason).startswith(
            ("ConnectionRefused", "PermissionError")
        )
        outside = await call(session, "python", code="import socket; socket.create_connection(('192.0.2.1', 80), 5)")
        assert "unreachable" in str(outside.reason)
        packet = await call(session, "python", code="import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)")
        assert "not supported" in str(packet.reason)
    assert server.received == []

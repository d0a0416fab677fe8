"""The proxy by which one sandbox reaches the hosts of its list, and nothing else.

It runs in a thread of the gateway with an event loop of its own. The sandbox has no other way out: its network has a
loopback interface only, on which this proxy listens. Names are resolved here, and the address that was checked is the
one that is connected to.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

import anyio
from anyio import from_thread, to_thread
from anyio.abc import SocketListener, SocketStream

from gateway.sandbox.host_rules import HostRules, parse_address
from gateway.sandbox.outside_waits import OutsideWaits
from gateway.sandbox.proxy_request import BadRequest, ProxyRequest, parse_request
from gateway.sandbox.sandbox_layout import inside_socket
from gateway.sandbox.socket_handover import SocketHandover

PORT = 3128
INSIDE = inside_socket(PORT)
ADDRESS = f"http://127.0.0.1:{PORT}"
ENVIRONMENT = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ADDRESS)
MAX_HEAD_BYTES, CHUNK_BYTES = 16_384, 65_536
MAX_CONNECTIONS, MAX_REFUSALS = 32, 20
START_S, HEAD_S, CONNECT_S, IDLE_S, DRAIN_S = 60.0, 20.0, 20.0, 120.0, 1.0
ATTEMPTS = 4
"""Addresses of a host that are tried."""
STREAM_ERRORS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Refused(Exception):
    """A connection that is not made: the status, and a text for the program and the policy."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class HostProxy:
    """The proxy of one sandbox."""

    def __init__(self, hosts: Sequence[str], max_bytes: int, socket_file: Path) -> None:
        self.rules, self.max_bytes, self.socket_file = HostRules(hosts), max_bytes, socket_file
        self.bytes = self.connections = 0
        self.waits = OutsideWaits()
        """Its waits for hosts to be reached. What happens on a connection is the doing of what runs in the sandbox."""
        self._refusals: list[str] = []
        self._lock = Lock()
        self.handover = SocketHandover(socket_file)
        """By which the sandbox hands its listening socket over."""

    def take_refusals(self) -> tuple[str, ...]:
        """What was refused since the last time."""
        with self._lock:
            refusals, self._refusals = self._refusals, []
        return tuple(refusals)

    async def serve(self) -> None:
        """Takes the sandbox's listening socket, once, and serves it."""
        with suppress(TimeoutError, OSError):
            with anyio.fail_after(START_S):
                listening = await self.handover.receive()
            async with await SocketListener.from_socket(listening) as listener:
                await listener.serve(self._handle)

    async def _handle(self, client: SocketStream) -> None:
        async with client:
            self.connections += 1
            try:
                with suppress(*STREAM_ERRORS):
                    await self._answer(client)
            finally:
                self.connections -= 1

    async def _answer(self, client: SocketStream) -> None:
        try:
            if self.connections > MAX_CONNECTIONS:
                raise Refused("503 Service Unavailable", f"more than {MAX_CONNECTIONS} connections at once")
            with anyio.fail_after(HEAD_S):
                head, rest = await _read_head(client)
            request = parse_request(head)
            with self.waits.wait():
                server = await self._connect(request)
        except BadRequest as error:
            await self._refuse(client, "400 Bad Request", str(error))
        except Refused as error:
            await self._refuse(client, error.status, str(error))
        except TimeoutError:
            await self._refuse(client, "408 Request Timeout", "no whole request came in time")
        else:
            async with server:
                await self._relay(client, server, request, rest)

    async def _refuse(self, client: SocketStream, status: str, text: str) -> None:
        self._note_refusal(text)
        body = f"The sandbox's proxy refuses this: {text}\n".encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await client.send(head.encode() + body)
        # Closed with bytes unread, the connection would be reset, and the client might never see the answer.
        with suppress(*STREAM_ERRORS), anyio.move_on_after(DRAIN_S):
            await client.send_eof()
            while True:
                await client.receive()

    def _note_refusal(self, text: str) -> None:
        with self._lock:
            if len(self._refusals) < MAX_REFUSALS and text not in self._refusals:
                self._refusals.append(text)

    async def _connect(self, request: ProxyRequest) -> SocketStream:
        """A connection to one of the host's addresses; raises Refused."""
        host, port = request.host, request.port
        place = f"{host}:{port}"
        if not self.rules.allows_name(host, port):
            raise Refused("403 Forbidden", f"{place} is not in the list of hosts")
        try:
            with anyio.fail_after(CONNECT_S):
                found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Refused("502 Bad Gateway", f"{place}: the name is not known") from None
        except TimeoutError:
            raise Refused("504 Gateway Timeout", f"{place}: the name was not resolved in time") from None
        addresses = [parse_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        allowed = [address for address in addresses if address and self.rules.allows_address(address, port)]
        if not allowed:
            raise Refused("403 Forbidden", f"{place} leads to an address that is not of the Internet")
        for address in dict.fromkeys(allowed[:ATTEMPTS]):
            with suppress(OSError, TimeoutError), anyio.fail_after(CONNECT_S):
                return await anyio.connect_tcp(str(address), port)
        raise Refused("502 Bad Gateway", f"{place} cannot be connected to")

    async def _relay(self, client: SocketStream, server: SocketStream, request: ProxyRequest, rest: bytes) -> None:
        """Copies both ways; of a plain request no more than its body, since another request may follow that."""
        if request.is_tunnel:
            await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            await server.send(request.head)
        left = None if request.is_tunnel else request.body_bytes
        # One way may be silent for long, as during a download; both together may not.
        async with anyio.create_task_group() as tasks:
            idle = tasks.cancel_scope
            idle.deadline = anyio.current_time() + IDLE_S

            async def copy(source: SocketStream, target: SocketStream, first: bytes, most: int | None) -> None:
                with suppress(*STREAM_ERRORS):
                    await self._copy(source, target, first, most, idle)
                    if most is None:
                        await target.send_eof()
                    return
                idle.cancel()

            tasks.start_soon(copy, client, server, rest, left)
            await copy(server, client, b"", None)
            idle.cancel()

    async def _copy(
        self, source: SocketStream, target: SocketStream, first: bytes, most: int | None, idle: anyio.CancelScope
    ) -> None:
        chunk = first[:most]
        left = most
        while True:
            self.bytes += len(chunk)
            if self.bytes > self.max_bytes:
                self._note_refusal(f"more than {self.max_bytes // 2**20} MB were sent and received")
                raise OSError("the limit on bytes is reached")
            idle.deadline = anyio.current_time() + IDLE_S
            if chunk:
                await target.send(chunk)
            left = None if left is None else left - len(chunk)
            if left == 0:
                return
            try:
                chunk = await source.receive(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
            except anyio.EndOfStream:
                return


async def _read_head(client: SocketStream) -> tuple[bytes, bytes]:
    """A request's lines, and what came after them."""
    received = bytearray()
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > MAX_HEAD_BYTES:
            raise BadRequest(f"the request has more than {MAX_HEAD_BYTES} bytes before its body")
        received += await client.receive(CHUNK_BYTES)
    return bytes(received[:end]), bytes(received[end + 4 :])


@asynccontextmanager
async def open_proxy(hosts: Sequence[str], max_mb: int) -> AsyncIterator[HostProxy]:
    """A proxy for one sandbox, which runs until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="mtrl-proxy-") as folder:
        proxy = HostProxy(hosts, max_mb * 2**20, Path(folder) / "socket")
        opened = from_thread.start_blocking_portal("asyncio")
        portal = await to_thread.run_sync(opened.__enter__)
        task = portal.start_task_soon(proxy.serve)
        try:
            yield proxy
        finally:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(partial(opened.__exit__, None, None, None))
            proxy.handover.close()

"""Transports of the gateway's MCP server: streamable HTTP for many clients, stdio for one that starts the process.

Over stdio, only protocol messages reach standard output. All reads and writes can be cancelled, so a client that is
silent or stops reading cannot keep the process from ending.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from select import PIPE_BUF
from typing import cast

import anyio
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.mcp_server.connected_clients import ConnectedClients, hold_id
from gateway.mcp_server.plain_calls import PlainCalls
from gateway.mcp_server.server import GatewayMcpServer

MAX_BODY_BYTES = 8 * 1024 * 1024


def build_mcp_app(
    gateway: Gateway, *, body_bytes: int = MAX_BODY_BYTES
) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The ASGI app for `/mcp`, and its lifespan. It must be mounted behind the security checks of `gateway.http`."""
    # Those checks cover Host and Origin; the SDK's would not know the configured hosts.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    server = GatewayMcpServer(gateway, single_client=False)
    manager = StreamableHTTPSessionManager(
        server,
        security_settings=security,
        session_idle_timeout=None,
        max_request_body_size=body_bytes,
        max_sessions=None,
    )
    server.middleware.append(hold_id)
    clients = ConnectedClients(StreamableHTTPASGIApp(manager), body_bytes)
    calls = PlainCalls(server, HeaderStripper(clients))
    return calls, _run(manager, clients, calls)


@asynccontextmanager
async def _run(
    manager: StreamableHTTPSessionManager, clients: ConnectedClients, calls: PlainCalls
) -> AsyncIterator[None]:
    async with manager.run(), anyio.create_task_group() as tasks:
        tasks.start_soon(clients.run)
        tasks.start_soon(calls.disconnects.run)
        yield
        tasks.cancel_scope.cancel()


class HeaderStripper:
    """Strips the white space around header values, which fast HTTP parsers leave in place.

    A wish to resume a stream is dropped, since no events are kept: the SDK would answer it with nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"] if name != b"last-event-id"]
        await self.app({**scope, "headers": headers}, receive, send)


_CHUNK_BYTES = 65536


async def serve_stdio(gateway: Gateway) -> None:
    """Serves one client on stdin and stdout until it closes stdin or the process gets SIGTERM or SIGINT."""
    server = GatewayMcpServer(gateway, single_client=True)
    with _claim_stdio() as (stdin_fd, stdout_fd):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_on_signal, tasks.cancel_scope)
            stdin = cast("anyio.AsyncFile[str]", StdinLines(stdin_fd))
            stdout = cast("anyio.AsyncFile[str]", StdoutPipe(stdout_fd))
            async with stdio_server(stdin, stdout) as (read, write):
                await server.run(read, write, server.create_initialization_options())
            tasks.cancel_scope.cancel()


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


@contextmanager
def _claim_stdio() -> Iterator[tuple[int, int]]:
    """Takes stdin and stdout for the protocol: tools print to stderr instead, and read an empty stdin."""
    stdin_fd, stdout_fd, null_fd = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)
    try:
        yield stdin_fd, stdout_fd
    finally:
        os.dup2(stdin_fd, 0)
        os.dup2(stdout_fd, 1)
        for fd in (stdin_fd, stdout_fd, null_fd):
            os.close(fd)


def _can_block(fd: int) -> bool:
    """Whether reads and writes may block; regular files never do, and cannot be polled."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class StdinLines:
    """Reads lines from a file descriptor; reads can be cancelled."""

    def __init__(self, fd: int) -> None:
        self._fd, self._can_block = fd, _can_block(fd)

    async def __aiter__(self) -> AsyncIterator[str]:
        rest = bytearray()
        while chunk := await self._read():
            rest += chunk
            if b"\n" in chunk:
                *lines, last = bytes(rest).split(b"\n")
                rest = bytearray(last)
                for line in lines:
                    yield line.decode(errors="replace")

    async def _read(self) -> bytes:
        if self._can_block:
            await anyio.wait_readable(self._fd)
        return os.read(self._fd, _CHUNK_BYTES)


class StdoutPipe:
    """Writes text to a file descriptor; writes can be cancelled, and are dropped once the reader is gone."""

    def __init__(self, fd: int) -> None:
        self._fd, self._can_block = fd, _can_block(fd)
        self._broken = False

    async def write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data and not self._broken:
            if self._can_block:
                await anyio.wait_writable(self._fd)
            try:
                # A writable pipe takes PIPE_BUF bytes; a longer write could block the whole process.
                data = data[os.write(self._fd, data[: PIPE_BUF if self._can_block else None]) :]
            except BrokenPipeError:
                self._broken = True

    async def flush(self) -> None:
        """Does nothing: writes are not buffered."""

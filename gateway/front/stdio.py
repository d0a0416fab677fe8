"""The server on standard input and output, for a client that starts it: there is nothing on the wire but protocol.

Every wait for the wire can be cancelled, so that neither a client that keeps silent nor one that stops reading can
keep the process from ending.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from select import PIPE_BUF
from typing import cast

import anyio
from mcp.server.stdio import stdio_server

from gateway.front.server import Front
from gateway.gateway import Gateway

_CHUNK = 65536


async def serve_stdio(gateway: Gateway) -> None:
    """Serves one client until it closes its end, or the process is asked to stop."""
    front = Front(gateway, one_client=True)
    with _claimed() as (come, go):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_heed, tasks.cancel_scope)
            stdin, stdout = cast("anyio.AsyncFile[str]", Lines(come)), cast("anyio.AsyncFile[str]", Pipe(go))
            async with stdio_server(stdin, stdout) as (read, write):
                await front.run(read, write, front.create_initialization_options())
            tasks.cancel_scope.cancel()


async def _heed(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


@contextmanager
def _claimed() -> Iterator[tuple[int, int]]:
    """What tools print goes to standard error, and what they read there ends at once."""
    come, go, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        yield come, go
    finally:
        os.dup2(come, 0)
        os.dup2(go, 1)
        for one in (come, go, nothing):
            os.close(one)


def _waits(fd: int) -> bool:
    """A file never makes anyone wait, and cannot be waited for."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class Lines:
    """What comes in, line by line."""

    def __init__(self, fd: int) -> None:
        self._fd, self._waits = fd, _waits(fd)

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
        if self._waits:
            await anyio.wait_readable(self._fd)
        return os.read(self._fd, _CHUNK)


class Pipe:
    """What goes out; once nobody reads it any more, it goes nowhere."""

    def __init__(self, fd: int) -> None:
        self._fd, self._waits = fd, _waits(fd)
        self._broken = False

    async def write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data and not self._broken:
            if self._waits:
                await anyio.wait_writable(self._fd)
            try:
                # So much fits into a pipe that can be written to; a longer write would block the whole process.
                data = data[os.write(self._fd, data[: PIPE_BUF if self._waits else None]) :]
            except BrokenPipeError:
                self._broken = True

    async def flush(self) -> None:
        """Nothing is held back."""

"""Servers for tests: how to start the misbehaving one, and how to be sure that it has ended."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

Web = Literal["sse", "http"]

MISBEHAVING = Path(__file__).with_name("misbehaving.py")
START_S = 30.0
END_S = 10.0


def stdio_command(*flags: str) -> tuple[str, list[str]]:
    """The program and the arguments that start the misbehaving server over stdio."""
    return sys.executable, [str(MISBEHAVING), "--transport", "stdio", *flags]


def free_port() -> int:
    """A port nobody listens on now; for a server that comes back at the same place (`--listen-port`)."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    atexit.register(held.close)  # Nobody else is given it, and a server may still listen there.
    return int(held.getsockname()[1])


@asynccontextmanager
async def serving(transport: Web, *flags: str) -> AsyncIterator[str]:
    """The misbehaving server over HTTP as a child process; gives its URL once it listens, ends its whole group."""
    command = [sys.executable, str(MISBEHAVING), "--transport", transport, *flags]
    process = await anyio.open_process(command, stdin=None, stderr=None, start_new_session=True)
    try:
        assert process.stdout is not None
        with anyio.fail_after(START_S):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 200)
        yield line.decode()
    finally:
        await end(process)


async def end(process: Process) -> None:
    with anyio.fail_after(END_S, shield=True):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()

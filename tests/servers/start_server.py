"""Starts the misbehaving server for tests, and kills it with its process group at the end."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

Web = Literal["sse", "http"]

MISBEHAVING = Path(__file__).with_name("misbehaving_server.py")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0


def stdio_command(*flags: str) -> tuple[str, list[str]]:
    """The command and arguments that start the misbehaving server over stdio."""
    return sys.executable, [str(MISBEHAVING), "--transport", "stdio", *flags]


def free_port() -> int:
    """A free port, for a server that restarts at the same address (`--listen-port`)."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    atexit.register(reserved.close)  # stays bound, so that no other process gets it; a server may still listen on it
    return int(reserved.getsockname()[1])


def serve_misbehaving(transport: Web, *flags: str) -> AbstractAsyncContextManager[str]:
    """The misbehaving server over HTTP as a child process; yields its URL once it listens."""
    return serve_script(MISBEHAVING, "--transport", transport, *flags)


@asynccontextmanager
async def serve_script(script: Path, *arguments: str) -> AsyncIterator[str]:
    """A Python script as a child process that prints its URL first, which is yielded."""
    command = [sys.executable, str(script), *arguments]
    process = await anyio.open_process(command, stdin=None, stderr=None, start_new_session=True)
    try:
        assert process.stdout is not None
        with anyio.fail_after(START_TIMEOUT_S):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 200)
        yield line.decode()
    finally:
        await kill_process_group(process)


async def kill_process_group(process: Process) -> None:
    with anyio.fail_after(END_TIMEOUT_S, shield=True):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await process.aclose()

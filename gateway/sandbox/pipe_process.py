"""A child process with pipes that are read and written from the event loop.

It is started in the loop's own thread: Linux ends a process that is to die with its parent when the thread ends that
started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import anyio

from gateway.large_json import run_beside

HEADER_BYTES = 8
"""Size of the length that precedes a message."""
CHUNK_BYTES = 65536
FIRST_EXIT_POLL_S, EXIT_POLL_S = 0.001, 0.01
EXIT_S = 5.0
"""How long a killed process may take to be gone."""
ERROR_BYTES = 2000


class ProcessEnded(Exception):
    """The process closed its output, or sent what is no message."""


class PipeProcess:
    """A child process that exchanges messages: bytes with their length before them."""

    def __init__(self, process: subprocess.Popen[bytes], errors: int) -> None:
        self._process, self._errors = process, errors
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        self._stdin, self._stdout = process.stdin.fileno(), process.stdout.fileno()
        for descriptor in (self._stdin, self._stdout):
            os.set_blocking(descriptor, False)
        self._buffer = bytearray()
        self._is_closed = False

    @classmethod
    def start(cls, command: Sequence[str]) -> Self:
        """Starts a command in a session of its own; what it writes to standard error is kept in memory."""
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603 - a command of ours
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        except BaseException:
            os.close(errors)
            raise
        return cls(process, errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.poll()

    @property
    def error_text(self) -> str:
        """The end of what it wrote to standard error."""
        size = os.fstat(self._errors).st_size if not self._is_closed else 0
        tail = os.pread(self._errors, ERROR_BYTES, max(0, size - ERROR_BYTES)) if size else b""
        return tail.decode("utf-8", "replace").strip()

    async def send(self, body: bytes) -> None:
        """Writes one message. Raises ProcessEnded if nobody reads it."""
        header = len(body).to_bytes(HEADER_BYTES, "big")
        for part in (header + body,) if len(body) <= CHUNK_BYTES else (header, body):
            data = memoryview(part)
            while data:
                try:
                    data = data[os.write(self._stdin, data) :]
                except BlockingIOError:
                    await anyio.wait_writable(self._stdin)
                except OSError as error:
                    raise ProcessEnded(str(error)) from error

    async def receive(self, max_bytes: int) -> bytes:
        """Reads one message. Raises ProcessEnded at the end of the output, and for a longer message."""
        length = int.from_bytes(await self._read(HEADER_BYTES), "big")
        if length > max_bytes:
            raise ProcessEnded(f"a message of {length} bytes is too long")
        return await self._read(length)

    async def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                chunk = os.read(self._stdout, CHUNK_BYTES)
            except BlockingIOError:
                await anyio.wait_readable(self._stdout)
                continue
            if not chunk:
                raise ProcessEnded("it closed its output")
            self._buffer += chunk
        if count > CHUNK_BYTES and count == len(self._buffer):
            buffer, self._buffer = self._buffer, bytearray()
            return await run_beside(bytes, buffer)
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def wait(self, within_s: float = EXIT_S) -> int | None:
        """The exit code, or None if it still runs after this time."""
        pause_s = FIRST_EXIT_POLL_S
        with anyio.move_on_after(within_s, shield=True):
            while self.exit_code is None:  # (the process has no event of its own)
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, EXIT_POLL_S)
        return self.exit_code

    async def kill(self) -> None:
        """Kills the process with its group, and closes the pipes."""
        if self._is_closed:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()
        self._is_closed = True
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                anyio.notify_closing(stream)
                stream.close()
        os.close(self._errors)

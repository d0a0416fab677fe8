"""Child processes whose pipes are read and written from the event loop, and the messages on them.

They are started in the loop's own thread: Linux ends a process that is to die with its parent when the thread ends that
started it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import IO, Self, Unpack

import anyio
from anyio.lowlevel import checkpoint

from gateway.large_json import run_beside
from gateway.process.child_entry import HEADER, MAX_BODY_BYTES, pack_header
from gateway.process.log_tail import read_tail
from gateway.process.spawn import EXIT_S, StartOptions, kill_group, spawn
from gateway.process.supervised_process import START_S, SupervisedProcess

CHUNK_BYTES = 65536
FIRST_EXIT_POLL_S, EXIT_POLL_S, EXIT_POLL_GROWTH = 0.001, 0.1, 1.25
"""An exit is noticed after a fifth of the time that was waited for it, at most."""
ERROR_BYTES = 2000


class _Pipe:
    def __init__(self, stream: IO[bytes] | None) -> None:
        if stream is None:
            raise ValueError("the process has no such pipe")
        self._stream, self._descriptor = stream, stream.fileno()
        os.set_blocking(self._descriptor, False)

    def close(self) -> None:
        """Closes the pipe, also for who waits for it: a child finds its input ended."""
        close_stream(self._stream)


class ReadPipe(_Pipe):
    """The output of a child process."""

    async def receive(self) -> bytes:
        """The next bytes; none at the end. Raises ClosedResourceError once the pipe was closed."""
        await checkpoint()  # Others have their turn. To wait for what is there already costs several times as much.
        while not self._stream.closed:
            with suppress(BlockingIOError):
                return os.read(self._descriptor, CHUNK_BYTES)
            await anyio.wait_readable(self._descriptor)
        raise anyio.ClosedResourceError


class WritePipe(_Pipe):
    """The input of a child process."""

    async def send(self, data: bytes) -> None:
        """Writes all of it. Raises OSError if nobody reads it, ClosedResourceError once the pipe was closed."""
        left = memoryview(data)
        while left:
            if self._stream.closed:
                raise anyio.ClosedResourceError
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._descriptor)


PIPE_ERRORS = (anyio.ClosedResourceError, OSError)
"""What `send` and `receive` raise."""


async def start_supervised(command: Sequence[str], **options: Unpack[StartOptions]) -> SupervisedProcess:
    """Starts a program under its supervisor; raises the OSError of a command that cannot be started."""
    process = SupervisedProcess(command, **options)
    try:
        with anyio.move_on_after(START_S):
            await anyio.wait_readable(process.control)
        process.read_start(0.0)
    except BaseException:
        await end_supervised(process, 0.0)
        raise
    return process


async def end_supervised(process: SupervisedProcess, grace_s: float, *, first_s: float | None = None) -> None:
    """Does what `SupervisedProcess.end` does, in the event loop, whether it is cancelled or not."""
    try:
        with anyio.CancelScope(shield=True):
            for wait_s in process.steps_to_end(grace_s, first_s):
                if await wait_for_exit(process.supervisor, wait_s):
                    break
    finally:
        process.close()
        for stream in (process.supervisor.stdin, process.supervisor.stdout, process.supervisor.stderr):
            close_stream(stream)


def close_stream(stream: IO[bytes] | None) -> None:
    """Closes a pipe, also for a task that waits for it."""
    if stream is not None and not stream.closed:
        anyio.notify_closing(stream.fileno())
        stream.close()


async def wait_for_exit(process: Popen[bytes], within_s: float) -> bool:
    """Whether the process exited in time. It has no event of its own."""
    pause_s = FIRST_EXIT_POLL_S
    with anyio.move_on_after(within_s):
        while process.poll() is None:
            await anyio.sleep(pause_s)
            pause_s = min(EXIT_POLL_GROWTH * pause_s, EXIT_POLL_S)
    return process.poll() is not None


class ProcessEnded(Exception):
    """The process closed its output, or sent what is no message."""


class PipeProcess:
    """A child process that answers messages, whose framing is `child_entry.py`'s."""

    def __init__(self, process: Popen[bytes] | SupervisedProcess, errors: int | None = None) -> None:
        """`errors` is the descriptor of a file with its standard error, which is closed with it."""
        self._supervised = process if isinstance(process, SupervisedProcess) else None
        self._process = process.supervisor if isinstance(process, SupervisedProcess) else process
        self._errors = errors
        self._input, self._output = WritePipe(self._process.stdin), ReadPipe(self._process.stdout)
        self._buffer = bytearray()
        self._count, self._is_closed = 0, False

    @classmethod
    def start(cls, command: Sequence[str]) -> Self:
        """Starts a command that ends with its first process, as sandboxes do; its standard error is kept in memory."""
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        try:
            return cls(spawn(command, stdin=PIPE, stdout=PIPE, stderr=errors), errors)
        except BaseException:
            os.close(errors)
            raise

    @classmethod
    async def start_supervised(cls, command: Sequence[str], env: Mapping[str, str]) -> Self:
        """Starts a command whose processes may be anywhere; they share this process's standard error."""
        return cls(await start_supervised(command, env=env, stdin=PIPE, stdout=PIPE))

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
        return "" if self._errors is None or self._is_closed else read_tail(self._errors, ERROR_BYTES)

    async def ask(self, body: bytes) -> bytes:
        """Sends a request and waits for its answer. Raises ProcessEnded; once cancelled, the process is of no use."""
        self._count += 1
        await self.send(self._count, body)
        request, answer = await self.receive()
        if request != self._count:
            raise ProcessEnded(f"it answered request {request}, not {self._count}")
        return answer

    async def send(self, request: int, body: bytes) -> None:
        """Writes one message. Raises ProcessEnded if nobody reads it."""
        header = pack_header(request, body)
        try:
            for part in (header + body,) if len(body) <= CHUNK_BYTES else (header, body):
                await self._input.send(part)
        except PIPE_ERRORS as error:
            raise ProcessEnded(str(error)) from error

    async def receive(self) -> tuple[int, bytes]:
        """Reads one message. Raises ProcessEnded at the end of the output, and for a longer message than may be."""
        request, length = HEADER.unpack(await self._read(HEADER.size))
        if length > MAX_BODY_BYTES:
            raise ProcessEnded(f"a message of {length} bytes is too long")
        return request, await self._read(length)

    async def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if not (chunk := await self._output.receive()):
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
        with anyio.CancelScope(shield=True):
            await wait_for_exit(self._process, within_s)
        return self.exit_code

    async def kill(self) -> None:
        """Kills the process with all that it started, and closes the pipes."""
        if self._is_closed:
            return
        if self._supervised is not None:
            await end_supervised(self._supervised, 0.0)
        else:
            kill_group(self._process.pid)
            await self.wait()
        self._is_closed = True
        self._input.close()
        self._output.close()
        if self._errors is not None:
            os.close(self._errors)

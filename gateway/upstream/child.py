"""A server that we start is ours to end: its whole process group, in bounded time, with its last words kept."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from gateway.upstream.fault import Flight, flight_now
from gateway.upstream.frames import addressee, failure, frame, messages
from gateway.upstream.lines import Lines, TooLong
from gateway.upstream.reaper import Reaper

_LAST_WORDS = 4096
_NOISE_KEPT = 3
_POLL_S = 0.01
_TOGETHER = 65536
"""Bytes after which no further line is added to a write."""
_GONE = (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)

Outgoing = tuple[bytes, Flight | None]


class Child:
    """A stdio server as a child process, and the pair of streams that the SDK speaks through."""

    transport = "stdio"

    def __init__(
        self, command: tuple[str, ...], *, env: Mapping[str, str], cwd: Path | None, most_bytes: int, reaper: Reaper
    ) -> None:
        self.command, self.cwd, self.most_bytes, self.reaper = command, cwd, most_bytes, reaper
        self.env = get_default_environment() | dict(env)
        self.process: Process | None = None
        self.patience_s = 1.0
        """For each of the polite requests to end."""
        self.noise: deque[str] = deque(maxlen=_NOISE_KEPT)
        self.noise_lines = 0
        self.flooded: str | None = None
        self._words = bytearray()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], ChildWriter]]:
        await self.reaper.start()
        self.process = process = await anyio.open_process(
            self.command, env=self.env, cwd=self.cwd, start_new_session=True
        )
        self.reaper.add(process.pid)
        heard, read = anyio.create_memory_object_stream[SessionMessage | Exception](64)
        write, spoken = anyio.create_memory_object_stream[Outgoing](64)
        try:
            async with anyio.create_task_group() as tasks, heard, read, write, spoken:
                tasks.start_soon(self._hear, process, heard)
                tasks.start_soon(self._speak, process, spoken)
                tasks.start_soon(self._keep_words, process)
                try:
                    yield read, ChildWriter(write)
                finally:
                    with anyio.move_on_after(2 * self.patience_s + 1, shield=True):
                        await self._stop(process)
                    tasks.cancel_scope.cancel()
        finally:
            _kill(process.pid)
            self.reaper.remove(process.pid)
            _forget(process)

    async def _hear(self, process: Process, heard: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Ends the connection by closing `heard`, after which the pipe is only drained."""
        stdout = cast(ByteReceiveStream, process.stdout)
        lines = Lines(self.most_bytes)
        with suppress(*_GONE):
            async with heard:
                while self.flooded is None:
                    for line in lines.feed(await stdout.receive()):
                        await self._deliver(line, heard)
        with suppress(*_GONE):
            while True:
                await stdout.receive()

    async def _deliver(self, line: bytes | TooLong, heard: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        if isinstance(line, TooLong):
            whose = addressee(line.head, line.tail)
            text = f"the answer is too large: more than {self.most_bytes} bytes"
            if whose is None:
                self.flooded = f"the server wrote a line of more than {self.most_bytes} bytes"
            else:
                await heard.send(SessionMessage(failure(whose, text)))
            return
        found = messages(line)
        if not found and line.strip():
            self.noise_lines += 1
            self.noise.append(line[:200].decode("utf-8", "replace").strip())
        for message in found:
            await heard.send(SessionMessage(message))

    async def _speak(self, process: Process, spoken: MemoryObjectReceiveStream[Outgoing]) -> None:
        stdin = cast(ByteSendStream, process.stdin)
        with suppress(*_GONE):
            async with spoken:
                async for first in spoken:
                    await stdin.send(b"".join(_taken(spoken, first)))

    async def _keep_words(self, process: Process) -> None:
        """Always drained, or a talkative server would block on its own log."""
        stderr = cast(ByteReceiveStream, process.stderr)
        with suppress(*_GONE):
            while True:
                self._words += await stderr.receive()
                del self._words[:-_LAST_WORDS]

    async def autopsy(self, wait_s: float = 0.5) -> str:
        """Why it ended, as far as can be known within a moment."""
        process = self.process
        if process is None:
            return "it never started"
        await _exited(process, wait_s)
        said = [self.flooded] if self.flooded else []
        code = process.returncode
        if code is not None:
            said.append(f"the process was ended by signal {-code}" if code < 0 else f"the process exited with {code}")
        elif not said:
            said.append("the process closed its output")
        return "; ".join((*said, *self.notes()))

    def notes(self) -> tuple[str, ...]:
        """What it said beside the protocol."""
        words = self._words.decode("utf-8", "replace").strip()
        return (
            *(
                (f"{self.noise_lines} lines of output were not JSON-RPC, such as {self.noise[0]!r}",)
                if self.noise
                else ()
            ),
            *((f"its standard error ends: {words[-600:]}",) if words else ()),
        )

    async def _stop(self, process: Process) -> None:
        """As the protocol asks: its input ends, then it is told, then it is killed; the group goes with it."""
        if process.stdin is not None:
            with suppress(*_GONE):
                await process.stdin.aclose()
        if await _exited(process, self.patience_s):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        if not await _exited(process, self.patience_s):
            _kill(process.pid)
            await _exited(process, 1.0)


class ChildWriter:
    """The writing end. A whole line is handed over or none, so a cancelled call never leaves half of one."""

    def __init__(self, lines: MemoryObjectSendStream[Outgoing]) -> None:
        self._lines = lines

    async def send(self, item: SessionMessage, /) -> None:
        await self._lines.send((frame(item.message) + b"\n", flight_now.get()))

    async def aclose(self) -> None:
        await self._lines.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _taken(spoken: MemoryObjectReceiveStream[Outgoing], first: Outgoing) -> Iterator[bytes]:
    """What waits to be said is said together: handing a line to the pipe costs more than making it."""
    outgoing, size = first, 0
    with suppress(anyio.WouldBlock, anyio.EndOfStream):
        while True:
            data, flight = outgoing
            if flight is not None:
                flight.sent = True
            yield data
            size += len(data)
            if size > _TOGETHER:
                return
            outgoing = spoken.receive_nowait()


async def _exited(process: Process, wait_s: float) -> bool:
    """Polls, because `wait` also waits for pipes that a grandchild may hold open."""
    with anyio.move_on_after(wait_s):
        while process.returncode is None:  # noqa: ASYNC110 (the process has no event of its own)
            await anyio.sleep(_POLL_S)
    return process.returncode is not None


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _forget(process: Process) -> None:
    """asyncio keeps the pipes while a grandchild holds them, and offers no public way to let go."""
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if callable(close := getattr(transport, "close", None)):
        with suppress(PermissionError):
            close()

"""Child processes that run calls of one function. A call that is cancelled or late ends its process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from gateway.bounded_json import SMALL_LENGTH
from gateway.large_json import run_beside
from gateway.native.function import FunctionPath
from gateway.native.process_protocol import HEADER_BYTES, body_length, decode_large_result, decode_result, encode
from gateway.types import Outcome, Text, ToolResult

MAX_PROCESSES = max(2, min(16, os.cpu_count() or 1))
"""Processes of one function; further calls wait, within their deadlines."""
EXIT_TIMEOUT_S = 5.0
"""Time for a killed process to be gone."""
PACKAGE_FOLDER = str(Path(__file__).parents[2])


class ProcessPool:
    """The child processes of one function. Each runs one call at a time and is kept for the next."""

    def __init__(self, function: FunctionPath, tool: str, max_processes: int = MAX_PROCESSES) -> None:
        self._function, self._tool = function, tool
        self._idle: list[_Child] = []
        self._slots = anyio.Semaphore(max_processes)
        self._closed = False

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs a call. If it is cancelled, as when its deadline passes, the process is killed."""
        async with self._slots:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                result = await child.call(arguments)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, ValueError) as error:
                await child.kill()
                reason = f"the process of tool {self._tool!r} ended during a call ({type(error).__name__})"
                return ToolResult((Text("The tool ended unexpectedly."),), Outcome.UNKNOWN, reason=reason)
            except BaseException:
                await child.kill()
                raise
            await self._keep(child)
            return result

    async def close(self) -> None:
        """Ends the processes that no call uses; those of calls under way end with their calls."""
        self._closed = True
        while self._idle:
            await self._idle.pop().kill()

    async def _keep(self, child: _Child) -> None:
        if self._closed:
            await child.kill()
        else:
            self._idle.append(child)

    async def _start(self) -> _Child:
        paths = dict.fromkeys([PACKAGE_FOLDER, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        with anyio.CancelScope(shield=True):  # A start that is cancelled halfway leaves a process that nobody knows.
            process = await anyio.open_process(
                [sys.executable, "-m", "gateway.native.process_worker"],
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        child = _Child(process)
        try:
            file = self._function.file
            start = {"function": self._function.name, "file": str(file) if file else "", "name": self._tool}
            await child.send(start | {"path": [folder for folder in sys.path if folder]})
        except BaseException:
            await child.kill()
            raise
        return child


class _Child:
    """One child process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        self._stdin, self._stdout = process.stdin, BufferedByteReceiveStream(process.stdout)

    async def send(self, message: Mapping[str, Any]) -> None:
        await self._stdin.send(encode(message))

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        await self.send({"arguments": dict(arguments)})
        header = await self._stdout.receive_exactly(HEADER_BYTES)
        body = await self._stdout.receive_exactly(body_length(header))
        return decode_result(body) if len(body) <= SMALL_LENGTH else await run_beside(decode_large_result, body)

    async def kill(self) -> None:
        """Kills the process and all that it started, which are in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with anyio.move_on_after(EXIT_TIMEOUT_S, shield=True):
            await self._process.wait()
            await self._process.aclose()

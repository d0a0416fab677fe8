"""Child processes that run calls of one function. A call that is cancelled or late ends its process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from gateway.native.function import FunctionPath
from gateway.native.result_json import decode_result
from gateway.process.pipe_process import PipeProcess, ProcessEnded
from gateway.types import Outcome, Text, ToolResult
from gateway.wire import dumps

MAX_PROCESSES = max(2, min(16, os.cpu_count() or 1))
"""Processes of one function; further calls wait, within their deadlines."""
PACKAGE_FOLDER = str(Path(__file__).parents[2])
COMMAND = (sys.executable, "-m", "gateway.process.child_entry", "gateway.native.process_worker:serve")


class ProcessPool:
    """The child processes of one function. Each runs one call at a time and is kept for the next."""

    def __init__(self, function: FunctionPath, tool: str, max_processes: int = MAX_PROCESSES) -> None:
        self._function, self._tool = function, tool
        self._idle: list[PipeProcess] = []
        self._slots = anyio.Semaphore(max_processes)
        self._closed = False

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs a call. If it is cancelled, as when its deadline passes, the process is killed with what it started."""
        async with self._slots:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                result = await decode_result(await child.ask(dumps(dict(arguments))))
            except (ProcessEnded, ValueError) as error:
                await child.kill()
                reason = f"the process of tool {self._tool!r} ended during a call ({error})"
                return ToolResult((Text("The tool ended unexpectedly."),), Outcome.UNKNOWN, reason=reason)
            except BaseException:
                await child.kill()
                raise
            if self._closed:
                await child.kill()
            else:
                self._idle.append(child)
            return result

    async def close(self) -> None:
        """Ends the processes that no call uses; those of calls under way end with their calls."""
        self._closed = True
        while self._idle:
            await self._idle.pop().kill()

    async def _start(self) -> PipeProcess:
        paths = dict.fromkeys([PACKAGE_FOLDER, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        child = await PipeProcess.start_supervised(COMMAND, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        try:
            file = self._function.file
            start = {"function": self._function.name, "file": str(file) if file else "", "name": self._tool}
            await child.send(0, dumps(start | {"path": [folder for folder in sys.path if folder]}))
        except BaseException:
            await child.kill()
            raise
        return child

"""One child process that answers JSON lines: requests from any thread, bounded answers, the tail of its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, cast
from uuid import uuid4

from mtrl_plugins.environments.host_server import MARK, kill_marked

MAX_LINE_BYTES = 64 * 2**20
"""The longest answer; a process that writes a longer line is ended."""
STOP_S = 8.0
"""How long a process may take to end once its input is closed."""
EXIT_S = 1.0
"""How long to wait for the exit code of a process whose output has ended."""
LOG_BYTES = 8192
"""How much of a process's standard error is kept."""
LEFT_OUT = ("PYTHONHOME", "VIRTUAL_ENV")
"""Variables of our own Python, which would mislead another one."""


class ChildEnded(Exception):
    """The process has ended; the text says how, and what it printed last."""


class ChildRefused(Exception):
    """The process answered a request with an error."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class HostChild:
    """A running process; raises OSError if it cannot be started. When its output ends, its group is killed,
    and what it started in other sessions."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        variables = {"PYTHONHASHSEED": "0", **os.environ}  # The order of a set of texts is the same in each process.
        variables = {name: value for name, value in variables.items() if name not in LEFT_OUT}
        self._mark = variables[MARK] = uuid4().hex
        self._process = subprocess.Popen(  # noqa: S603 - the operator's own Python
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=variables
        )
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._log = bytearray()
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._end = ""
        """How it ended."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write, self._drain)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return bool(self._end)

    def send(
        self, operation: str, fields: dict[str, Any], when_done: Callable[[Any], None] | None = None
    ) -> Future[Any]:
        """Sends a request; `when_done` is called in the thread that reads answers."""
        future: Future[Any] = Future()
        if when_done is not None:
            future.add_done_callback(when_done)
        with self._lock:
            if self._end:
                raise ChildEnded(self._end)
            self._count += 1
            self._pending[self._count] = future
            self._outgoing.put(json.dumps({"id": self._count, "do": operation, **fields}).encode() + b"\n")
        return future

    def describe_log(self) -> str:
        """What the process printed last."""
        text = self._log.decode("utf-8", "replace").strip()
        return f"it printed last: {text[-800:]}" if text else "it printed nothing"

    def stop(self, wait_s: float = STOP_S) -> None:
        """Closes its input, waits a moment, and kills its group."""
        self._outgoing.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(EXIT_S)

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill_marked(self._mark)

    def _write(self) -> None:
        """Writes in a thread of its own, because a process that does not read blocks the writer."""
        with suppress(OSError), cast(IO[bytes], self._process.stdin) as stream:
            while (line := self._outgoing.get()) is not None:
                stream.write(line)
                stream.flush()

    def _read(self) -> None:
        how = "ended"
        with suppress(OSError), cast(IO[bytes], self._process.stdout) as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") or not self._settle(line):
                    how = f"wrote {line[:80]!r} to its wire"
                    break
        self._kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self._threads[2].join(EXIT_S)
        self._outgoing.put(None)
        with self._lock:
            self._end = f"{how} (exit code {self._process.returncode}); {self.describe_log()}"
            lost, self._pending = self._pending, {}
        for future in lost.values():
            future.set_exception(ChildEnded(self._end))

    def _settle(self, line: bytes) -> bool:
        """Passes an answer to its waiting caller; False if it is none."""
        try:
            answer = json.loads(line)
            error, id = answer.get("error"), answer["id"]
            refusal = None if error is None else ChildRefused(str(error["problem"]), str(error["remedy"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        with self._lock:
            future = self._pending.pop(id, None)
        if future is not None and refusal is not None:
            future.set_exception(refusal)
        elif future is not None:
            future.set_result(answer.get("ok"))
        return True

    def _drain(self) -> None:
        with suppress(OSError), cast(IO[bytes], self._process.stderr) as stream:
            while data := os.read(stream.fileno(), 2**16):
                self._log += data
                del self._log[:-LOG_BYTES]

"""A child process that answers many requests at a time, which any thread and any event loop may send."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from io import BufferedReader
from queue import SimpleQueue
from subprocess import PIPE
from typing import Any, Unpack, cast

from gateway.process.child_entry import HEADER, MAX_BODY_BYTES, pack_header
from gateway.process.log_tail import LogTail
from gateway.process.pipe_process import ProcessEnded
from gateway.process.spawn import CHUNK_BYTES, StartOptions
from gateway.process.supervised_process import SupervisedProcess

EXIT_S = 1.0
"""How long to wait for the exit code of a process whose output has ended."""


class RequestRefused(Exception):
    """The process answered a request with an error."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class RequestProcess:
    """A process under its supervisor. When its output ends, it is killed with all that it started.

    Requests are JSON; answers come in any order, by `Wire.send_value` or `Wire.send_problem`.
    """

    def __init__(self, command: Sequence[str], *, alone_s: float = 0.0, **options: Unpack[StartOptions]) -> None:
        """Raises OSError if it cannot be started. `alone_s`: see `SupervisedProcess`."""
        options["stdin"] = options["stdout"] = options["stderr"] = PIPE
        self._process = SupervisedProcess(command, alone_s=alone_s, **options)
        try:
            self._process.read_start()
        except BaseException:
            with self._process.supervisor:  # Closes its pipes.
                self._process.end(0.0)
            raise
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._log = LogTail()
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
        return bool(self._end) or not self._process.is_running

    def send(self, request: Any, when_done: Callable[[Any], None] | None = None) -> Future[Any]:
        """Sends a request; `when_done` is called in the thread that reads answers. Raises ProcessEnded."""
        body = json.dumps(request).encode()
        future: Future[Any] = Future()
        if when_done is not None:
            future.add_done_callback(when_done)
        with self._lock:
            if self._end:
                raise ProcessEnded(self._end)
            self._count += 1
            self._outgoing.put(pack_header(self._count, body) + body)
            self._pending[self._count] = future
        return future

    def describe_log(self) -> str:
        """What the process printed last."""
        return f"it printed last: {self._log.text[-800:]}" if self._log.text else "it printed nothing"

    def stop(self, wait_s: float) -> None:
        """Closes its input, waits a moment, and kills it with all that it started."""
        self._outgoing.put(None)
        self._process.end(0.0, first_s=wait_s)
        for thread in self._threads:
            thread.join(EXIT_S)

    def _write(self) -> None:
        """Writes in a thread of its own, because a process that does not read blocks the writer."""
        with suppress(OSError), cast("Any", self._process.supervisor.stdin) as stream:
            while (left := memoryview(self._outgoing.get() or b"")).nbytes:
                while left:
                    left = left[stream.write(left) :]

    def _read(self) -> None:
        how = "ended"
        with suppress(OSError), BufferedReader(cast("Any", self._process.supervisor.stdout)) as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                request, length = HEADER.unpack(header)
                if length > MAX_BODY_BYTES or not self._settle(request, stream.read(length)):
                    how = f"wrote {header!r} to its wire"
                    break
        self._process.end(0.0, first_s=EXIT_S if how == "ended" else 0.0)
        self._threads[2].join(EXIT_S)
        self._outgoing.put(None)
        with self._lock:
            self._end = f"{how} (exit code {self._process.exit_code}); {self.describe_log()}"
            lost, self._pending = self._pending, {}
        for future in lost.values():
            future.set_exception(ProcessEnded(self._end))

    def _settle(self, request: int, body: bytes) -> bool:
        """Passes an answer to its waiting caller; False if it is none."""
        try:
            answer = json.loads(body)
            error = answer.get("error")
            refusal = None if error is None else RequestRefused(str(error["problem"]), str(error["remedy"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        with self._lock:
            future = self._pending.pop(request, None)
        if future is not None and refusal is not None:
            future.set_exception(refusal)
        elif future is not None:
            future.set_result(answer.get("ok"))
        return True

    def _drain(self) -> None:
        with suppress(OSError), cast("Any", self._process.supervisor.stderr) as stream:
            while data := os.read(stream.fileno(), CHUNK_BYTES):
                self._log.add(data)

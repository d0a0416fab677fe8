"""Child processes that are forked from one which has imported torch, transformers and the trainer.

`python -m trainer.cli` spends five seconds on imports before it does anything. Tests of what it does then use
`ForkedPopen` in place of `subprocess.Popen`. That it starts without this is held by tests that start it as users do.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from coverage import Coverage

Popen = subprocess.Popen  # also where tests put `ForkedPopen` in its place
SERVER = Path(__file__).with_name("fork_server.py")
COVERAGE: dict[str, str] = {}
"""Variables that tell a Python to measure coverage, which workers of pytest-xdist keep from their children."""
START_S = 120.0
"""How long its imports may take on a busy machine."""


class ForkServer:
    """The process that forks, one for each process of tests; it ends with that process, whose socket it reads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(START_S)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        with theirs:
            command = [sys.executable, str(SERVER), str(theirs.fileno())]
            self._process = Popen(
                command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL
            )
        self._ended: dict[int, int] = {}
        self._buffer = b""
        atexit.register(self.close, os.getpid())

    def close(self, owner: int) -> None:
        """Ends the server, but not when a fork of its owner ends."""
        if os.getpid() == owner:
            self._socket.close()
            self._process.kill()
            self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Starts a child with these as its standard streams; returns its process id."""
        socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], descriptors)
        while True:
            answer = self._read()
            if "started" in answer:
                pid = int(answer["started"])
                self._ended.pop(pid, None)  # The system may give the id of a child that has ended to another.
                return pid

    def poll(self, pid: int) -> int | None:
        """The child's exit code as `subprocess` has it, or None while it runs."""
        while pid not in self._ended and (b"\n" in self._buffer or select.select([self._socket], [], [], 0)[0]):
            self._read()
        return self._ended.get(pid)

    def _read(self) -> dict[str, int]:
        while b"\n" not in self._buffer:
            received = self._socket.recv(65536)
            if not received:
                raise RuntimeError(f"{SERVER.name} ended with {self._process.wait(10)}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, int] = json.loads(line)
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["code"]
        return answer


@cache
def fork_server(owner: int) -> ForkServer:
    """The server of this process; not that of the process that it was forked from."""
    return ForkServer()


class ForkedPopen(Popen):  # type: ignore[type-arg]
    """Like `subprocess.Popen` for `python -m MODULE ...` and `python FILE ...`; other commands start as always."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [*map(str, args)] if isinstance(args, (list, tuple)) else [args]
        is_python = words[0] == sys.executable and len(words) > 1 and (words[1] == "-m" or words[1][0] != "-")
        self._is_forked = is_python and words[1:3] != ["-m", "torch.distributed.run"]
        if not self._is_forked:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        cwd, env, pipes = rest[4], rest[5], rest[9:15]
        stdin, stdout, stderr = pipes[0], pipes[3], pipes[5]
        request = {
            "argv": words[1:], "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env),
            "coverage": COVERAGE if Coverage.current() else {},  # not while it pauses
        }  # fmt: skip
        self._server = fork_server(os.getpid())
        with open(os.devnull, "rb") as null:
            streams = [null.fileno() if stdin < 0 else stdin, 1 if stdout < 0 else stdout, 2 if stderr < 0 else stderr]
            self.pid = self._server.fork(request, streams)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True

    def _internal_poll(self, *rest: Any, **more: Any) -> int | None:
        if not getattr(self, "_is_forked", False):
            return super()._internal_poll(*rest, **more)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            self.returncode = self._server.poll(self.pid)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self._is_forked:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._internal_poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.005)
        return int(self.returncode)

    def send_signal(self, sig: int) -> None:
        if not self._is_forked:
            super().send_signal(sig)
        elif self.poll() is None:
            os.kill(self.pid, signal.Signals(sig))

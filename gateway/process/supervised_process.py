"""A program under its supervisor, so that no process that it started outlives it. Standard library only.

`supervisor_process.py` is its parent and adopts what it leaves behind. If this process ends, by `kill -9` too, their
socket does, and the supervisor kills the program with all that it started.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from threading import Lock
from typing import Unpack

from gateway.process.spawn import StartOptions, kill_group, spawn

_SUPERVISOR = str(Path(__file__).with_name("supervisor_process.py"))
START_S = 60.0
"""How long a supervisor may take to report its program. It imports little, but the machine may be busy."""
KILL_S = 6.0
"""How long a supervisor may take to kill a program with all that it started."""


class SupervisedProcess:
    """A program and its supervisor, which has the program's pipes and exit code."""

    def __init__(self, command: Sequence[str], *, alone_s: float = 0.0, **options: Unpack[StartOptions]) -> None:
        """Starts the supervisor; `read_start` tells when the program runs. Raises OSError.

        Once this process is gone, the program has `alone_s` to end by itself, as its input does.
        """
        self._command, self._reports, self._ending = command[0], b"", Lock()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        words = (sys.executable, "-I", "-S", _SUPERVISOR, str(theirs.fileno()), str(alone_s), *command)
        try:
            with theirs:
                options["pass_fds"] = (theirs.fileno(),)
                self.supervisor = spawn(words, **options)
        except BaseException:
            self.control.close()
            raise
        self.pid = 0
        """The program's own process id, once it is known."""

    def read_start(self, within_s: float = START_S) -> None:
        """Waits for the report of the start. Raises the OSError of a command that cannot be started."""
        deadline = time.monotonic() + within_s
        while b"\n" not in self._reports:
            if not select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(errno.ETIMEDOUT, "it did not start in time", self._command)
            if not self._receive():
                break
        kind, number = self._reports[:1], self._reports.split(b"\n")[0][1:]
        if kind != b"p":
            problem = int(number) if kind == b"e" else errno.ECHILD
            raise OSError(problem, os.strerror(problem), self._command)
        self.pid = int(number)

    def _receive(self) -> bool:
        """Reads reports; whether there may be more."""
        try:
            chunk = self.control.recv(256)
        except BlockingIOError:
            return True
        except OSError:
            chunk = b""
        self._reports += chunk
        return bool(chunk)

    @property
    def exit_code(self) -> int | None:
        """The program's exit code; negative for a signal, None while it or something that it started is there."""
        return self.supervisor.poll()

    @property
    def is_running(self) -> bool:
        """Whether the program itself is there: the supervisor reaps it before it kills what is left."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return self.exit_code is None

    def send_signal(self, number: int) -> None:
        """Sends a signal to the program's process group."""
        with suppress(OSError):
            self.control.send(bytes([number]))

    def wait(self, within_s: float) -> bool:
        """Whether it has ended in time. Blocks."""
        with suppress(TimeoutExpired):
            self.supervisor.wait(within_s)
        return self.exit_code is not None

    def end(self, grace_s: float, *, first_s: float | None = None, number: int = signal.SIGTERM) -> None:
        """Ends the program with all that it started: waits, sends a signal, waits, kills. Blocks, for a bounded time.

        The first wait, for a program whose input was closed, lasts `first_s`, or else as long as the second.
        """
        with self._ending:
            try:
                any(self.wait(wait_s) for wait_s in self.steps_to_end(grace_s, first_s, number))
            finally:
                self.close()

    def steps_to_end(self, grace_s: float, first_s: float | None, number: int = signal.SIGTERM) -> Iterator[float]:
        """Acts step by step, and tells how long to wait for the end after each; `close` comes last."""
        yield grace_s if first_s is None else first_s
        self.send_signal(number)
        yield grace_s
        self.send_signal(signal.SIGKILL)
        yield KILL_S

    def close(self) -> None:
        """Kills what a supervisor leaves that is stuck, or was itself killed."""
        if self.control.fileno() < 0:
            return
        if self.exit_code is None:
            kill_group(self.supervisor.pid)
        while select.select([self.control], [], [], 0)[0] and self._receive():
            pass
        if self.pid and b"x" not in self._reports:
            kill_group(self.pid)
        self.control.close()
        if self.exit_code is None:
            with suppress(TimeoutExpired):
                self.supervisor.wait(1.0)

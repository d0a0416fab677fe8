"""Starts and ends a program under its supervisor, so that no process it started outlives it.

Stdio servers run like this, and agents that are programs.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio.abc import Process

from gateway.mcp_client.reaper import Reaper
from gateway.mcp_client.supervisor_process import KILL_SIGNAL

_SUPERVISOR_SCRIPT = Path(__file__).with_name("supervisor_process.py")
_POLL_S = 0.01
_KILL_S = 3.0
"""How long the supervisor may take to kill a server with all that it started."""


class SupervisedProcess:
    """A server and its supervisor. The supervisor has the server's pipes and exit code."""

    def __init__(self, process: Process, reports: int, reaper: Reaper) -> None:
        self.process, self._reports, self._reaper = process, reports, reaper
        self.server_pid: int | None = None

    @classmethod
    async def start(
        cls, command: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, reaper: Reaper, stderr: int = PIPE
    ) -> SupervisedProcess:
        """Starts the server; raises the OSError of a command that cannot be started."""
        reports, inherited = os.pipe()
        os.set_blocking(reports, False)
        try:
            script = (sys.executable, "-I", "-S", str(_SUPERVISOR_SCRIPT), str(inherited))
            with anyio.CancelScope(shield=True):  # A start that is cancelled halfway leaves a process nobody knows.
                process = await anyio.open_process(
                    (*script, *command),
                    env=dict(env),
                    cwd=cwd,
                    stderr=stderr,
                    start_new_session=True,
                    pass_fds=(inherited,),
                )
        except BaseException:
            os.close(reports)
            raise
        finally:
            os.close(inherited)
        supervised = cls(process, reports, reaper)
        reaper.add_supervisor(process.pid)
        try:
            await supervised._read_start(command[0])
        except BaseException:
            await supervised.end(0.0)
            raise
        return supervised

    async def _read_start(self, command: str) -> None:
        await anyio.wait_readable(self._reports)
        report = os.read(self._reports, 64)
        if report[:1] == b"p":
            self.server_pid = int(report.split()[0][1:])
            return
        number = int(report[1:]) if report[:1] == b"e" else errno.ECHILD
        raise OSError(number, os.strerror(number), command)

    async def end(self, grace_s: float, *, first_s: float | None = None) -> None:
        """Ends the server, whose input is closed: waits, sends SIGTERM, waits, kills. Bounded.

        The first wait lasts `first_s`, or else as long as the second.
        """
        process, first_s = self.process, grace_s if first_s is None else first_s
        try:
            with anyio.CancelScope(shield=True):
                for number, wait_s in ((None, first_s), (signal.SIGTERM, grace_s), (KILL_SIGNAL, _KILL_S)):
                    if number is not None:
                        with suppress(ProcessLookupError):
                            os.kill(process.pid, number)
                    if await wait_for_exit(process, wait_s):
                        break
        finally:
            self._kill_rest()
            self._reaper.remove_supervisor(process.pid)
            os.close(self._reports)

    def _kill_rest(self) -> None:
        """Kills what a supervisor leaves that is stuck, or was itself killed."""
        if self.process.returncode is None:
            _kill_group(self.process.pid)
        if self.server_pid is not None and not self._has_finished():
            _kill_group(self.server_pid)

    def _has_finished(self) -> bool:
        """Whether the supervisor reported that nothing is left."""
        try:
            return os.read(self._reports, 64)[:1] == b"x"
        except BlockingIOError:
            return False


async def wait_for_exit(process: Process, wait_s: float) -> bool:
    """Whether the process exited in time. Polls, because `wait` also waits for pipes a grandchild may hold open."""
    with anyio.move_on_after(wait_s):
        while process.returncode is None:  # noqa: ASYNC110 (the process has no event of its own)
            await anyio.sleep(_POLL_S)
    return process.returncode is not None


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def close_pipes(process: Process) -> None:
    """Closes the transport: asyncio keeps pipes open while a grandchild holds them, and has no public way to close."""
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if callable(close := getattr(transport, "close", None)):
        with suppress(PermissionError):
            close()

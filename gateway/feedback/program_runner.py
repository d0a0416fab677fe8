"""Runs Python programs of the policy in confined, limited child processes.

Each program has a sandbox of its own. Limited are wall clock, CPU time, memory, disk, processes and printed output. A
program has an empty environment, an empty folder, and no site packages.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

import anyio

from gateway.errors import ConfigError, Unavailable
from gateway.process.pipe_process import PIPE_ERRORS, ReadPipe, WritePipe, close_stream, wait_for_exit
from gateway.process.reaper import Reaper
from gateway.process.spawn import kill_group, spawn
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import Confined, find_problem
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandboxed_command import SandboxedCommand, open_command

KILLED = frozenset(code for number in (signal.SIGXCPU, signal.SIGKILL) for code in (-number, 128 + number))
"""Exit statuses of programs that a signal ended; processes that wait for them in namespaces add 128."""
PYTHON_COMMAND = (os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8")
PROGRAM, PROCESSES, FILES, DISK_MB = "/program.py", 16, 1000, 8
"""In a sandbox: the path of the program, and limits."""
EXIT_GRACE_S = 2.0
"""How long to wait for pipes that descendants of a killed program may still hold."""


TOO_LONG = "it ran longer than "
"""The start of the reason why a program was stopped at its time limit."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one program run."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 1024 * 1024
    output_bytes: int = 64 * 1024
    """For stdout and stderr each; a program that prints more is killed."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Output and end of one program run."""

    stdout: str
    stderr: str
    exit_status: int | None
    """None if the program was stopped."""
    stop_reason: str = ""
    """Why the program was stopped."""


class _OutputBuffer:
    """Collects a program's output up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self.overflowed = False

    async def read(self, pipe: ReadPipe, process: Popen[bytes]) -> None:
        while chunk := await pipe.receive():
            self._data += chunk[: self._max_bytes - len(self._data) + 1]
            if len(self._data) > self._max_bytes:
                self.overflowed = True
                kill_group(process.pid)
                return

    @property
    def text(self) -> str:
        return bytes(self._data[: self._max_bytes]).decode("utf-8", "replace")


async def run_python(
    source: str,
    stdin: str = "",
    limits: ProgramLimits = ProgramLimits(),
    reaper: Reaper | None = None,
) -> ProgramResult:
    """Runs a program until it ends or reaches a limit. Raises Unavailable where its sandbox does not start."""
    async with _open_sandbox(limits, reaper, source) as sandbox:
        command = (*sandbox.line, "/usr/bin/env", "-i", *PYTHON_COMMAND, PROGRAM)
        process = spawn(command, env={}, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            return await _communicate(process, stdin, limits, sandbox)
        finally:
            kill_group(process.pid)
            with anyio.CancelScope(shield=True):
                await wait_for_exit(process, EXIT_GRACE_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                close_stream(stream)


@asynccontextmanager
async def _open_sandbox(limits: ProgramLimits, reaper: Reaper | None, source: str) -> AsyncIterator[SandboxedCommand]:
    """A sandbox for one program. At the end all that the program left is gone."""
    with tempfile.TemporaryDirectory(prefix="mtrl-", ignore_cleanup_errors=True) as name:
        program = Path(name) / "program.py"
        await anyio.Path(program).write_text(source, encoding="utf-8", errors="replace")
        settings = SandboxSettings(
            memory_mb=limits.memory_bytes // 2**20,
            cpu_s=limits.cpu_s,
            disk_mb=DISK_MB,
            files=FILES,
            processes=PROCESSES,
        )
        confined = Confined(
            (), settings, (sys.base_prefix,), files={PROGRAM: str(program)}, limits_memory_by_process=True
        )
        began = time.perf_counter()
        async with open_command(confined, reaper) as held:
            statistics.count_start(time.perf_counter() - began)
            try:
                yield held
            finally:
                statistics.count_end()


async def _communicate(
    process: Popen[bytes], stdin: str, limits: ProgramLimits, sandbox: SandboxedCommand
) -> ProgramResult:
    out, err = _OutputBuffer(limits.output_bytes), _OutputBuffer(limits.output_bytes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(out.read, ReadPipe(process.stdout), process)
        tasks.start_soon(err.read, ReadPipe(process.stderr), process)
        tasks.start_soon(_write_stdin, WritePipe(process.stdin), stdin)
        is_late = not await wait_for_exit(process, limits.wall_s)
        # Remaining children would keep the pipes open.
        kill_group(process.pid)
        tasks.cancel_scope.deadline = anyio.current_time() + EXIT_GRACE_S
    if is_late:
        return ProgramResult(out.text, err.text, None, f"{TOO_LONG}{limits.wall_s:g} s")
    if out.overflowed or err.overflowed:
        return ProgramResult(out.text, err.text, None, f"it printed more than {limits.output_bytes} bytes")
    if (process.returncode or 0) < 0:  # Nothing inside can signal bubblewrap's outer process.
        raise Unavailable(f"the sandbox was ended from outside, by signal {-(process.returncode or 0)}")
    if not sandbox.has_started():
        raise Unavailable(f"a sandbox did not start: {err.text.strip()[-300:]}")
    if reason := sandbox.find_limit():
        return ProgramResult(out.text, err.text, None, reason)
    if process.returncode in KILLED:
        reason = f"it used more than {limits.cpu_s} s of CPU time, or too much memory"
        return ProgramResult(out.text, err.text, None, reason)
    return ProgramResult(out.text, err.text, process.returncode)


async def _write_stdin(pipe: WritePipe, stdin: str) -> None:
    # A program may end without reading its input.
    with suppress(*PIPE_ERRORS):
        await pipe.send(stdin.encode("utf-8", "replace"))
    pipe.close()


def require_sandbox() -> None:
    """Raises ConfigError where programs cannot be confined: they could read secrets and end the gateway."""
    if (problem := find_problem()) is not None:
        problem, _, remedy = problem.partition("\n  remedy: ")
        raise ConfigError(
            f"programs of the policy cannot be confined here: {problem}", remedy=remedy or "install bubblewrap"
        )

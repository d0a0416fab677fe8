"""A stranger's program is run as a child: limited, bounded in what it prints, and gone when its time is up.

What holds: wall clock, CPU time, memory, size of files, number of open files, an empty environment, a folder of its
own that is removed, no site packages, an own process group that is killed at the end. For every user but root, the
program cannot start a process or a thread. What does not hold: the network, reading any file that the gateway's user
may read, and (as root only) a grandchild that leaves the process group. Where the policy may be malicious rather
than merely careless, run the gateway in a container without a network, as a user without rights.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from gateway.feedback import limited

PYTHON = (sys.executable, "-I", "-S", "-B", "-X", "utf8")
GRACE_S = 2.0
"""Patience with pipes that a killed program's descendants may still hold."""


@dataclass(frozen=True, slots=True)
class Bounds:
    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 1024 * 1024
    file_bytes: int = 1024 * 1024
    output_bytes: int = 64 * 1024
    """Of each of the two outputs; one byte more ends the program."""


@dataclass(frozen=True, slots=True)
class Ran:
    stdout: str
    stderr: str
    status: int | None
    """None where the program was ended from outside."""
    ended: str = ""
    """Why it was ended."""


class _Output:
    """What a program has printed so far, and whether that was too much."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._data = bytearray()
        self.overflown = False

    async def read(self, stream: ByteReceiveStream | None, process: Process) -> None:
        if stream is None:
            return
        async for chunk in stream:
            self._data += chunk[: self._most - len(self._data) + 1]
            if len(self._data) > self._most:
                self.overflown = True
                _kill(process)
                return

    @property
    def text(self) -> str:
        return bytes(self._data[: self._most]).decode("utf-8", "replace")


async def run_python(source: str, stdin: str = "", bounds: Bounds = Bounds()) -> Ran:
    """Runs a program to its end, or to one of its bounds."""
    with _folder() as folder:
        program = folder / "program.py"
        await anyio.Path(program).write_text(source, encoding="utf-8", errors="replace")
        limits = (str(bounds.cpu_s), str(bounds.memory_bytes), str(bounds.file_bytes))
        command = (*PYTHON, limited.__file__, *limits, *PYTHON, str(program))
        process = await anyio.open_process(command, cwd=folder, env={}, start_new_session=True)
        try:
            return await _watch(process, stdin, bounds)
        finally:
            _kill(process)
            with anyio.move_on_after(GRACE_S, shield=True):
                await process.wait()
                await process.aclose()


async def _watch(process: Process, stdin: str, bounds: Bounds) -> Ran:
    out, err = _Output(bounds.output_bytes), _Output(bounds.output_bytes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(out.read, process.stdout, process)
        tasks.start_soon(err.read, process.stderr, process)
        tasks.start_soon(_feed, process, stdin)
        with anyio.move_on_after(bounds.wall_s) as clock:
            await process.wait()
        # Whoever it left behind holds the pipes open.
        _kill(process)
        tasks.cancel_scope.deadline = anyio.current_time() + GRACE_S
    if clock.cancelled_caught:
        return Ran(out.text, err.text, None, f"it ran longer than {bounds.wall_s:g} s")
    if out.overflown or err.overflown:
        return Ran(out.text, err.text, None, f"it printed more than {bounds.output_bytes} bytes")
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Ran(out.text, err.text, None, f"it used more than {bounds.cpu_s} s of CPU time, or too much memory")
    return Ran(out.text, err.text, process.returncode)


async def _feed(process: Process, stdin: str) -> None:
    if process.stdin is None:
        return
    # A program need not read what it is given.
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.send(stdin.encode("utf-8", "replace"))
    with suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mtrl-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _kill(process: Process) -> None:
    """The whole group: its leader's number is the group's, as long as anyone is in it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

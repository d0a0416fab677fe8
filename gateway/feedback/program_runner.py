"""Runs Python programs of the policy in confined, limited child processes, alone or with an assertion about them.

Each program has a sandbox of its own, where sandboxes can be started; else `python_programs.py` confines it. Limited
are: wall clock, CPU time, memory, disk, processes and printed output. A program has an empty environment, an empty
folder, and no site packages. An assertion is evaluated in a second sandbox, of which the program can neither read nor
change anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from gateway.errors import ConfigError, Unavailable
from gateway.mcp_client.reaper import Reaper
from gateway.sandbox import sandbox_statistics as statistics
from gateway.sandbox.bubblewrap import Confined
from gateway.sandbox.python_programs import PYTHON_COMMAND, Confinement, confine, find_confinement, program_folder
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandboxed_command import SandboxedCommand, open_command

KILLED = frozenset(code for number in (signal.SIGXCPU, signal.SIGKILL) for code in (-number, 128 + number))
"""Exit statuses of programs that a signal ended; processes that wait for them in namespaces add 128."""
BOOT = """
import sys, types
folder, module = sys.argv[1], sys.argv.pop(2)
for name, path in (("gateway", folder), ("gateway.feedback", folder + "/feedback")):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [path]
del sys.argv[1]
__import__(f"gateway.feedback.{module}", fromlist=["main"]).main()
"""
"""Runs a module of ours where none of our other modules and no packages are there."""
PROGRAM, PROCESSES, FILES = "/program.py", 16, 1000
"""In a sandbox: the path of the program, and limits."""
FIRST_DESCRIPTOR = 20
ASSERTION_SCRIPTS = ("assertion_link", "assertion_process", "program_process")
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
    file_bytes: int = 8 * 1024 * 1024
    """Of one file; in a sandbox, of all files of each folder."""
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

    async def read(self, stream: ByteReceiveStream | None, process: Process) -> None:
        if stream is None:
            return
        async for chunk in stream:
            self._data += chunk[: self._max_bytes - len(self._data) + 1]
            if len(self._data) > self._max_bytes:
                self.overflowed = True
                _kill_group(process)
                return

    @property
    def text(self) -> str:
        return bytes(self._data[: self._max_bytes]).decode("utf-8", "replace")


async def run_python(
    source: str,
    stdin: str = "",
    limits: ProgramLimits = ProgramLimits(),
    confinement: Confinement | None = None,
    reaper: Reaper | None = None,
) -> ProgramResult:
    """Runs a program until it ends or reaches a limit. Raises ConfigError if it cannot be confined, and Unavailable."""
    confinement = confinement or choose_confinement(is_unsafe=False)
    async with _open_place(confinement, limits, reaper, source) as place:
        return await _run((*PYTHON_COMMAND, place.program), place, stdin, limits)


async def run_assertion(
    source: str,
    assertion: str,
    stdin: str = "",
    limits: ProgramLimits = ProgramLimits(),
    confinement: Confinement | None = None,
    reaper: Reaper | None = None,
) -> str | ProgramResult | None:
    """Evaluates an assertion about a program; None if it holds.

    Else what the assertion raised, or, if the program did not answer what it was asked, how the program ended.
    """
    confinement = confinement or choose_confinement(is_unsafe=False)
    results: dict[str, ProgramResult] = {}
    async with (
        _open_place(confinement, limits, reaper, source) as program,
        _open_place(confinement, limits, reaper) as judge,
    ):
        with _open_pipes() as (of_program, of_judge):

            async def run_program() -> None:
                command = _our_module("program_process", program.program, *of_program.descriptors)
                results["program"] = await _run(command, program, stdin, limits, of_program)

            async def run_judge() -> None:
                command = _our_module("assertion_process", *of_judge.descriptors)
                results["judge"] = await _run(command, judge, assertion, limits, of_judge)
                if _read_verdict(results["judge"]) is not None:
                    tasks.cancel_scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_program)
                tasks.start_soon(run_judge)
    verdict = _read_verdict(results["judge"])
    if verdict is None:
        is_judge_to_blame = results["judge"].stop_reason and not results["program"].stop_reason
        return results["judge" if is_judge_to_blame else "program"]
    return None if verdict.is_passed else verdict.problem


@dataclass(frozen=True, slots=True)
class _Verdict:
    is_passed: bool
    problem: str


def _read_verdict(result: ProgramResult) -> _Verdict | None:
    """What the assertion's process wrote about the assertion; None if the program left it without an answer."""
    if result.stop_reason:
        return None
    try:
        verdict = json.loads(result.stdout)
        is_conclusive = not verdict["is_broken"]
        return _Verdict(verdict["problem"] is None, str(verdict["problem"])) if is_conclusive else None
    except (ValueError, TypeError, KeyError):
        return _Verdict(False, f"the assertion could not be evaluated: {result.stderr[-200:].strip()}")


class _PipeEnds:
    """The ends of pipes that a process inherits: one to read from, one to write to."""

    def __init__(self, read: int, write: int) -> None:
        self.descriptors = (read, write)
        self._files = (os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0))

    def close(self) -> None:
        """Closes them in this process, so that the process at their other ends sees when the one that has them ends."""
        for file in self._files:
            file.close()


@contextmanager
def _open_pipes() -> Iterator[tuple[_PipeEnds, _PipeEnds]]:
    """Two pipes between two processes, which get an end of each."""
    asks, answers = _pipe(), _pipe()
    ends = _PipeEnds(asks[0], answers[1]), _PipeEnds(answers[0], asks[1])
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def _pipe() -> tuple[int, int]:
    """A pipe with high numbers: bubblewrap is given files by low ones."""
    low = os.pipe()
    try:
        read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR) for end in low)
    finally:
        for end in low:
            os.close(end)
    return read, write


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a command can be run confined."""

    confine: Callable[[Sequence[str]], Sequence[str]]
    """The whole command line."""
    folder: Path | None = None
    """The working folder outside, without a sandbox."""
    program: str = PROGRAM
    """The path of the program there."""
    sandbox: SandboxedCommand | None = None


@asynccontextmanager
async def _open_place(
    confinement: Confinement, limits: ProgramLimits, reaper: Reaper | None, source: str = ""
) -> AsyncIterator[_Place]:
    """A place for one command: a sandbox, or a folder. At the end all that the command left is gone."""
    scripts = [str(Path(__file__).with_name(f"{name}.py")) for name in ASSERTION_SCRIPTS]
    with program_folder() as folder:
        program = folder.path / "program.py"
        await anyio.Path(program).write_text(source, encoding="utf-8", errors="replace")
        if confinement != "sandbox":
            numbers = (limits.cpu_s, limits.memory_bytes, limits.file_bytes)
            yield _Place(
                lambda command: confine(confinement, folder, numbers, command, scripts), folder.path, str(program)
            )
            return
        settings = SandboxSettings(
            memory_mb=limits.memory_bytes // 2**20,
            cpu_s=limits.cpu_s,
            disk_mb=-(-limits.file_bytes // 2**20),
            files=FILES,
            processes=PROCESSES,
        )
        confined = Confined(
            (), settings, (*scripts, sys.base_prefix), files={PROGRAM: str(program)}, limits_memory_by_process=True
        )
        began = time.perf_counter()
        async with open_command(confined, reaper) as held:
            statistics.count_start(time.perf_counter() - began)
            try:
                yield _Place(lambda command: (*held.line, "/usr/bin/env", "-i", *command), sandbox=held)
            finally:
                statistics.count_end()


def _our_module(module: str, *arguments: str | int) -> tuple[str, ...]:
    return (*PYTHON_COMMAND, "-c", BOOT, str(Path(__file__).parents[1]), module, *map(str, arguments))


async def _run(
    command: Sequence[str],
    place: _Place,
    stdin: str,
    limits: ProgramLimits,
    pipe_ends: _PipeEnds | None = None,
) -> ProgramResult:
    """Runs a command in its place; it inherits its ends of the pipes."""
    words, ends = place.confine(command), pipe_ends.descriptors if pipe_ends else ()
    with anyio.CancelScope(shield=True):  # Cancelled inside, it would leave the process to nobody.
        process = await anyio.open_process(words, cwd=place.folder, env={}, start_new_session=True, pass_fds=ends)
    try:
        if pipe_ends is not None:
            pipe_ends.close()
        return await _communicate(process, stdin, limits, place.sandbox)
    finally:
        _kill_group(process)
        with anyio.move_on_after(EXIT_GRACE_S, shield=True):
            await process.wait()
            await process.aclose()


async def _communicate(
    process: Process, stdin: str, limits: ProgramLimits, sandbox: SandboxedCommand | None
) -> ProgramResult:
    out, err = _OutputBuffer(limits.output_bytes), _OutputBuffer(limits.output_bytes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(out.read, process.stdout, process)
        tasks.start_soon(err.read, process.stderr, process)
        tasks.start_soon(_write_stdin, process, stdin)
        with anyio.move_on_after(limits.wall_s) as wall_clock:
            await process.wait()
        # Remaining children would keep the pipes open.
        _kill_group(process)
        tasks.cancel_scope.deadline = anyio.current_time() + EXIT_GRACE_S
    if wall_clock.cancelled_caught:
        return ProgramResult(out.text, err.text, None, f"{TOO_LONG}{limits.wall_s:g} s")
    if out.overflowed or err.overflowed:
        return ProgramResult(out.text, err.text, None, f"it printed more than {limits.output_bytes} bytes")
    if sandbox is not None and (process.returncode or 0) < 0:  # Nothing inside can signal bubblewrap's outer process.
        raise Unavailable(f"the sandbox was ended from outside, by signal {-(process.returncode or 0)}")
    if sandbox is not None and not sandbox.has_started():
        raise Unavailable(f"a sandbox did not start: {err.text.strip()[-300:]}")
    if sandbox is not None and (reason := sandbox.find_limit()):
        return ProgramResult(out.text, err.text, None, reason)
    if process.returncode in KILLED:
        reason = f"it used more than {limits.cpu_s} s of CPU time, or too much memory"
        return ProgramResult(out.text, err.text, None, reason)
    return ProgramResult(out.text, err.text, process.returncode)


async def _write_stdin(process: Process, stdin: str) -> None:
    if process.stdin is None:
        return
    # A program may end without reading its input.
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.send(stdin.encode("utf-8", "replace"))
    with suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()


def choose_confinement(is_unsafe: bool) -> Confinement:
    """How programs are confined on this machine. Raises ConfigError if they cannot be, unless that is wanted."""
    confinement = find_confinement()
    if confinement is None and not is_unsafe:
        problem = "programs of the policy cannot be confined here: they could read secrets and end the gateway"
        raise ConfigError(problem, field="unsafe", remedy="install bubblewrap, or accept that with `unsafe: true`")
    return confinement or "none"


def _kill_group(process: Process) -> None:
    """Kills the process group, whose id is its leader's for as long as it has a member."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

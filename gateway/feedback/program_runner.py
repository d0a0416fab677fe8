"""Runs Python programs of the policy in confined, limited child processes, alone or with an assertion about them.

Limited are: wall clock, CPU time, memory, file size, open files and printed output. A program has an empty environment,
a temporary folder, no site packages, and a process group of its own that is killed at the end. An assertion is
evaluated in a second process, confined as well, of which the program can neither read nor change anything.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from gateway.errors import ConfigError
from gateway.sandbox.python_programs import (
    PYTHON_COMMAND,
    Confinement,
    ProgramFolder,
    confine,
    find_confinement,
    program_folder,
)

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
    file_bytes: int = 1024 * 1024
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
    source: str, stdin: str = "", limits: ProgramLimits = ProgramLimits(), confinement: Confinement | None = None
) -> ProgramResult:
    """Runs a program until it ends or reaches a limit. Raises ConfigError if it cannot be confined."""
    confinement = confinement or choose_confinement(is_unsafe=False)
    with program_folder() as folder:
        program = await _write_program(folder, source)
        return await _run((*PYTHON_COMMAND, program), folder, stdin, limits, confinement)


async def run_assertion(
    source: str,
    assertion: str,
    stdin: str = "",
    limits: ProgramLimits = ProgramLimits(),
    confinement: Confinement | None = None,
) -> str | ProgramResult | None:
    """Evaluates an assertion about a program; None if it holds.

    Else what the assertion raised, or, if the program did not answer what it was asked, how the program ended.
    """
    confinement = confinement or choose_confinement(is_unsafe=False)
    results: dict[str, ProgramResult] = {}
    with program_folder() as program, program_folder() as judge, _open_pipes() as (of_program, of_judge):

        async def run_program() -> None:
            command = _our_module("program_process", await _write_program(program, source), *of_program.descriptors)
            results["program"] = await _run(command, program, stdin, limits, confinement, of_program)

        async def run_judge() -> None:
            command = _our_module("assertion_process", *of_judge.descriptors)
            results["judge"] = await _run(command, judge, assertion, limits, confinement, of_judge)
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
    asks, answers = os.pipe(), os.pipe()
    ends = _PipeEnds(asks[0], answers[1]), _PipeEnds(answers[0], asks[1])
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


async def _write_program(folder: ProgramFolder, source: str) -> str:
    program = folder.path / "program.py"
    await anyio.Path(program).write_text(source, encoding="utf-8", errors="replace")
    return str(program)


def _our_module(module: str, *arguments: str | int) -> tuple[str, ...]:
    return (*PYTHON_COMMAND, "-c", BOOT, str(Path(__file__).parents[1]), module, *map(str, arguments))


async def _run(
    command: Sequence[str],
    folder: ProgramFolder,
    stdin: str,
    limits: ProgramLimits,
    confinement: Confinement,
    pipe_ends: _PipeEnds | None = None,
) -> ProgramResult:
    """Runs a command in its folder; it inherits its ends of the pipes."""
    limit_args = (limits.cpu_s, limits.memory_bytes, limits.file_bytes)
    scripts = [str(Path(__file__).with_name(f"{name}.py")) for name in ASSERTION_SCRIPTS] if pipe_ends else []
    command = confine(confinement, folder, limit_args, command, scripts)
    ends = pipe_ends.descriptors if pipe_ends else ()
    with anyio.CancelScope(shield=True):  # Cancelled inside, it would leave the process to nobody.
        process = await anyio.open_process(command, cwd=folder.path, env={}, start_new_session=True, pass_fds=ends)
    try:
        if pipe_ends is not None:
            pipe_ends.close()
        return await _communicate(process, stdin, limits)
    finally:
        _kill_group(process)
        with anyio.move_on_after(EXIT_GRACE_S, shield=True):
            await process.wait()
            await process.aclose()


async def _communicate(process: Process, stdin: str, limits: ProgramLimits) -> ProgramResult:
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

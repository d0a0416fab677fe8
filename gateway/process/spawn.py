"""Starts programs in sessions of their own, kills their groups, and runs short commands. Standard library only."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import IO, Any, TypedDict, Unpack

CHUNK_BYTES = 65536
EXIT_S = 5.0
"""How long a killed process may take to be gone."""
MAX_PRINTED_BYTES = 16 * 2**20
"""How much a short command may print, unless its caller says otherwise."""


class StartOptions(TypedDict, total=False):
    """How a program is started: its streams, which lead nowhere unless said otherwise, and what `Popen` takes."""

    stdin: int | IO[bytes]
    stdout: int | IO[bytes] | None
    stderr: int | IO[bytes] | None
    """By default this process's."""
    env: Mapping[str, str] | None
    cwd: str | Path | None
    pass_fds: Sequence[int]
    user: int
    """Without other groups."""


def spawn(command: Sequence[str], **options: Unpack[StartOptions]) -> Popen[bytes]:
    """Starts a program in a session of its own, so that Ctrl-C is not for it, and one signal ends it with its children.

    Pipes are unbuffered. Linux ends a program that is to die with its parent when the thread ends that started it.
    """
    words: dict[str, Any] = {"stdin": DEVNULL, "stdout": DEVNULL, **options}
    if "user" in words:
        words |= {"group": words["user"], "extra_groups": []}
    return Popen(command, bufsize=0, start_new_session=True, **words)  # noqa: S603 - no shell reads the command


def kill_group(leader: int, number: int = signal.SIGKILL) -> bool:
    """Sends a signal to a process group, whose id is its leader's while it has a member; tells whether it has one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
        return True
    return False


def end_process(process: Popen[bytes], within_s: float) -> int | None:
    """Waits for a process, kills its group, and reaps it. Returns its exit code; None if the kernel does not end it."""
    with suppress(TimeoutExpired):
        process.wait(within_s)
    if not kill_group(process.pid):
        process.kill()
    with suppress(TimeoutExpired):
        process.wait(EXIT_S)
    return process.poll()


class CommandError(OSError):
    """A command took too long or printed too much."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended; a negative status is a signal's."""

    status: int
    output: bytes
    errors: bytes

    @property
    def text(self) -> str:
        """Its output as text."""
        return self.output.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Its standard error as text, without space around it."""
        return self.errors.decode("utf-8", "replace").strip()


def run_command(
    command: Sequence[str],
    within_s: float,
    *,
    max_bytes: int = MAX_PRINTED_BYTES,
    **options: Unpack[StartOptions],
) -> Finished:
    """Runs a command without input to its end, and kills what it left behind. Blocks: it belongs into a thread.

    Raises OSError if it cannot be started, and CommandError.
    """
    options["stdout"] = options["stderr"] = PIPE
    process = spawn(command, **options)
    printed = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + within_s
    try:
        with selectors.DefaultSelector() as selector:
            for stream in printed:
                selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
            while selector.get_map():
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise CommandError(f"it did not end within {within_s:g} s")
                for key, _ in selector.select(left_s):
                    if not (chunk := os.read(key.fd, CHUNK_BYTES)):
                        selector.unregister(key.fileobj)
                    printed[key.fileobj] += chunk  # type: ignore[index]
                    if len(printed[key.fileobj]) > max_bytes:  # type: ignore[index]
                        raise CommandError(f"it printed more than {max_bytes} bytes")
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            raise CommandError(f"it did not end within {within_s:g} s") from None
    finally:
        end_process(process, 0.0)
        for stream in printed:
            stream.close()  # type: ignore[union-attr]
    return Finished(process.returncode, *map(bytes, printed.values()))

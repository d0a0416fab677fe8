"""Runs bash on a script where nothing but bash can act: no files, no network, no programs, limits on everything.

Bubblewrap confines bash. Inside there are bash, a few text programs, stubs, and small folders in memory that are gone
afterwards.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, TimeoutExpired
from typing import IO

from gateway.process.spawn import StartOptions, end_process, run_command, spawn
from mtrl_plugins.scripts import stubs

SYSTEM_PATH = "/usr/bin:/bin"
NOBODY = 65534
"""The user that bash runs as if this process is root's."""
BIN = "/mtrl/bin"
DEADLINE_S = 10.0
"""Seconds until all processes of a script are killed."""
LIST_S = 30.0
"""Seconds in which `ldd` lists libraries."""
KILL_S = 10.0
"""Seconds in which killed processes end."""
MAX_OUTPUT_BYTES = 4 * 2**20
"""Largest file, and largest record of what a script launched."""
LIMITS = {"FILE_BLOCKS": MAX_OUTPUT_BYTES // 1024, "SECONDS": 10, "MEMORY": 128 * 1024, "PROCESSES": 48}
TEMPORARY = "/tmp"  # noqa: S108 - in memory, and seen by nobody else.
MEMORY_FOLDERS = ("/data", "/home", "/mnt", "/opt", "/root", "/scratch", "/srv", TEMPORARY, "/var", "/workspace")
"""Folders that scripts write to; each is empty, in memory, and small."""
FOLDER_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Jail:
    """What exists inside: everything else of the machine does not."""

    words: Sequence[str]
    """The words of bash's command line."""
    folder: str
    """The working folder, which is empty."""
    files: Mapping[str, str]
    """Texts of files, which cannot be written."""
    links: Mapping[str, str]
    environment: Mapping[str, str]
    programs: Mapping[str, str]
    """Files of the system by their path inside, which cannot be written."""

    @property
    def memory_folders(self) -> list[str]:
        """Where folders in memory are mounted: the top folders of the working folder, the script and HOME too."""
        named = (self.folder, self.environment["HOME"], *map(os.path.dirname, self.files))
        tops = {f"/{PurePosixPath(path).parts[1]}" for path in named if len(PurePosixPath(path).parts) > 1}
        return sorted({*MEMORY_FOLDERS, *tops} - {"/mtrl"})

    @property
    def launcher(self) -> list[str]:
        """The command that sets limits and starts bash."""
        return ["/bin/bash", "-p", "-c", stubs.fill_in(stubs.LAUNCHER, LIMITS), "bash", *self.words]


@dataclass(frozen=True, slots=True)
class Ended:
    """What a confined bash left: its records, its last messages, and whether it was killed at the deadline."""

    records: bytes
    messages: str
    timed_out: bool


@cache
def system_files() -> tuple[tuple[str, str], ...]:
    """Bash, the text programs and their libraries: the path inside, and the file."""
    found = {f"{BIN}/{name}": shutil.which(name, path=SYSTEM_PATH) for name in stubs.TEXT_COMMANDS}
    found["/bin/bash"] = found[f"{BIN}/bash"] = shutil.which("bash", path=SYSTEM_PATH)
    programs = {inside: os.path.realpath(file) for inside, file in found.items() if file is not None}
    words = [shutil.which("ldd", path=SYSTEM_PATH) or "", *sorted(set(programs.values()))]
    listed = run_command(words, LIST_S).text
    libraries = {word for line in listed.splitlines() for word in line.split() if line[:1].isspace() and word[0] == "/"}
    return (*programs.items(), *((library, os.path.realpath(library)) for library in sorted(libraries)))


def run_confined(jail: Jail, deadline_s: float = DEADLINE_S) -> Ended:
    """Runs bash in a jail; only where `can_confine()`."""
    with ExitStack() as stack:
        words = list(_bubblewrap_options(jail, stack))
        descriptors = [int(words[index + 1]) for index, word in enumerate(words) if word == "--ro-bind-data"]
        return _run([*words, "--", *jail.launcher], deadline_s, descriptors)


@cache
def can_confine() -> bool:
    """True if a script inside records its command, and neither reads a file outside nor sees its processes."""
    script = f'[[ ! -e {sys.executable} && ! -e /etc/passwd ]] && cat "$0" | (read -r x; probe "${{x:0:1}}")'
    files = {"/mtrl/script": script, f"{BIN}/probe": '#!/bin/bash -p\nprintf "%s" "$1" >&200\n'}
    with suppress(OSError):  # No `bwrap`, no `ldd`, no `bash`.
        jail = Jail(["/mtrl/script"], TEMPORARY, files, {}, {"PATH": BIN, "HOME": TEMPORARY}, dict(system_files()))
        return run_confined(jail).records == b"["
    return False


def _bubblewrap_options(jail: Jail, stack: ExitStack) -> Iterator[str]:
    yield from ("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL")
    for folder in jail.memory_folders:
        yield from ("--size", str(FOLDER_BYTES), "--tmpfs", folder)
    yield from ("--dir", jail.folder, "--dir", jail.environment["HOME"])
    for inside, file in jail.programs.items():
        yield from ("--ro-bind", file, inside)
    for inside, text in jail.files.items():
        content = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by the stack
        content.write(text.encode())
        content.seek(0)
        yield from ("--perms", "0755", "--ro-bind-data", str(content.fileno()), inside)
    for inside, target in jail.links.items():
        yield from ("--symlink", target, inside)
    yield from ("--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", jail.folder)
    for name, value in jail.environment.items():
        yield from ("--setenv", name, value)


def _run(words: Sequence[str], deadline_s: float, descriptors: Sequence[int]) -> Ended:
    """Runs a command whose output goes into files, and kills its process group in the end."""
    alive, held = os.pipe()
    with tempfile.TemporaryFile() as records, tempfile.TemporaryFile() as messages, open(alive, "rb", 0) as alive_pipe:
        try:
            options = StartOptions(
                stdin=DEVNULL,
                stdout=records,
                stderr=messages,
                cwd="/",
                env={"PATH": SYSTEM_PATH},
                pass_fds=(*descriptors, held),
            )
            if os.geteuid() == 0:
                options["user"] = NOBODY
            process = spawn(words, **options)
        finally:
            os.close(held)
        try:
            with suppress(TimeoutExpired):
                process.wait(deadline_s)
            timed_out = process.poll() is None
        finally:
            end_process(process, 0.0)
            _wait_until_closed(alive_pipe)
        return Ended(_read_start(records), _read_start(messages).decode(errors="replace"), timed_out)


def _wait_until_closed(pipe: IO[bytes]) -> None:
    """Waits until no process has the other end: the kernel ends those of a namespace after its first one."""
    end = time.monotonic() + KILL_S
    while (left_s := end - time.monotonic()) > 0 and select.select([pipe], [], [], left_s)[0] and pipe.read(2**16):
        pass


def _read_start(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)


def make_jail(script: Path, text: str, environment: Mapping[str, str], output: str, hidden: Sequence[str]) -> Jail:
    """The jail of a script; `output` is what stubs print, and the programs `hidden` do not exist."""
    folder, path = str(Path.cwd()), os.path.abspath(script)
    values = {"OUTPUT": output}
    files = {
        "/mtrl/stub": stubs.fill_in(stubs.STUB, values),
        stubs.PRELUDE_FILE: stubs.fill_in(stubs.PRELUDE, values),
        path: text,
    }
    names = [name for name in (*stubs.LAUNCHERS, *stubs.QUIET_COMMANDS) if name not in hidden]
    links = {f"{BIN}/{name}": "/mtrl/stub" for name in names} | {f"{BIN}/sh": "/bin/bash"}
    added = {"PATH": BIN, "BASH_ENV": stubs.PRELUDE_FILE, "MTRL_SCRIPT": str(script), "PWD": folder}
    return Jail([str(script)], folder, files, links, {"HOME": "/root", **environment, **added}, dict(system_files()))

"""Confines Python programs of the policy: they see no process and no file but their own, and write to one folder.

Sandboxes do it where they can be started (`sandboxed_command.py`). This is for machines without bubblewrap: namespaces,
else, for a gateway of root, an unprivileged user.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from gateway.process.spawn import run_command
from gateway.sandbox import child_limits, namespaces
from gateway.sandbox.bubblewrap import find_problem
from gateway.sandbox.program_users import unused_user
from gateway.sandbox.sandbox_layout import SYSTEM_FOLDERS

Confinement = Literal["sandbox", "namespaces", "user", "none"]
CONFINEMENTS: tuple[Confinement, ...] = ("sandbox", "namespaces", "user")
DESCRIPTIONS: Mapping[Confinement, str] = {
    "sandbox": "a sandbox each: no files, no network, no other processes, limits on all",
    "namespaces": "namespaces: no files, no network, no other processes",
    "user": "an unprivileged user: they read files that anybody may read, and reach the network",
    "none": "nothing (`unsafe: true`): they can read secrets and end the gateway",
}
"""What holds programs, as `check` tells it."""
INTERPRETER = os.path.realpath(sys.executable)
PYTHON_COMMAND = (INTERPRETER, "-I", "-S", "-B", "-X", "utf8")
MEMORY_BYTES = 2**20
"""Size of the file system in memory that has the root folder inside."""
PROBE_TIMEOUT_S = 20.0
PROBE_LIMITS = (10, 2**30, 2**20)
PROBE = """
import os, sys
parent, outside, inside = int(sys.argv[1]), sys.argv[2], sys.argv[3]
open(inside, "w").close()
def refused(act):
    try:
        act()
    except OSError:
        return True
    return False
refusals = [
    refused(lambda: os.kill(parent, 0)),
    refused(lambda: open(f"/proc/{parent}/environ", "rb")),
    refused(lambda: open(outside, "wb")),
    refused(lambda: open(outside, "rb")),
]
print("confined" if all(refusals) else refusals)
"""


@dataclass(frozen=True, slots=True)
class ProgramFolder:
    """A temporary folder that one confined program may write to, and the user that it runs as."""

    path: Path
    user: int


def confine(
    confinement: Confinement,
    folder: ProgramFolder,
    limits: tuple[int, int, int],
    command: Sequence[str],
) -> tuple[str, ...]:
    """The command line without a sandbox; limits are seconds of CPU, bytes of memory and of a file."""
    user = folder.user if confinement == "user" else 0  # In namespaces, `namespaces.py` changes it.
    limited = (*PYTHON_COMMAND, child_limits.__file__, str(user), *map(str, limits), *command)
    paths = [path for path in (*SYSTEM_FOLDERS, sys.base_prefix, child_limits.__file__) if Path(path).exists()]
    if confinement == "namespaces":
        layout = _namespace_layout(folder, paths, limited)
        return (*PYTHON_COMMAND, namespaces.__file__, json.dumps(layout))
    return limited


def _namespace_layout(folder: ProgramFolder, paths: Sequence[str], command: Sequence[str]) -> dict[str, object]:
    """What `namespaces.py` makes: the system's programs, Python, and the program's folder."""
    return {
        "memory_folders": [], "folder_bytes": MEMORY_BYTES, "programs": {path: path for path in paths}, "files": {},
        "links": {}, "folders": [str(folder.path)], "writable": [str(folder.path)], "environment": {},
        "launcher": list(command), "user": folder.user,
    }  # fmt: skip


@contextmanager
def program_folder() -> Iterator[ProgramFolder]:
    """A temporary folder for one confined program."""
    with ExitStack() as stack:
        user = os.geteuid() or stack.enter_context(unused_user())
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="mtrl-", ignore_cleanup_errors=True))
        path = Path(name).resolve()
        if os.geteuid() == 0:
            os.chown(path, user, 0)
            path.chmod(0o770)
        yield ProgramFolder(path, user)


@cache
def find_confinement() -> Confinement | None:
    """The first way to confine programs that works on this machine; None if there is none."""
    return next((kind for kind in CONFINEMENTS if confines(kind)), None)


@cache
def confines(confinement: Confinement) -> bool:
    """Whether a program that is confined so can neither signal nor read its parent, nor use files outside its folder.

    An unprivileged user may read those that are meant for everybody.
    """
    if confinement == "sandbox":
        return find_problem() is None
    if confinement == "user" and os.geteuid() != 0:
        return False
    with program_folder() as folder, tempfile.NamedTemporaryFile() as outside:
        if confinement != "user":
            os.chmod(outside.name, 0o644)
        words = (str(os.getpid()), outside.name, str(folder.path / "inside"))
        command = confine(confinement, folder, PROBE_LIMITS, (*PYTHON_COMMAND, "-c", PROBE, *words))
        with suppress(OSError):
            return run_command(command, PROBE_TIMEOUT_S, cwd=folder.path, env={}).output == b"confined\n"
    return False

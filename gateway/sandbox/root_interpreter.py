"""The gateway's interpreter in boxes that have a root, with its own loader and libraries: an image needs none."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gateway.process import child_entry
from gateway.sandbox import command_server, interpreter_process, proxy_listener, root_entry

PLACE = "/.mtrl"
"""Where it is inside."""
MAPPED = re.compile(r"/.*/(?P<name>(libc\.so\.6|libc-2\..*\.so|ld-[^/]*\.so(\.\d+)?))$")
_BASE = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
LOADED_PYTHON = (
    f"{PLACE}/loader", "--library-path", f"{PLACE}/libraries:{PLACE}/python/lib",
    f"{PLACE}/python/{os.path.relpath(_BASE, os.path.realpath(sys.base_prefix))}",
)  # fmt: skip
"""The command of the interpreter: the loader of the machine runs it with the machine's libraries."""
SCRIPTS = {f"{PLACE}/{Path(module.__file__ or '').name}": str(module.__file__) for module in (
    child_entry, command_server, interpreter_process, proxy_listener, root_entry,
)}  # fmt: skip


def script(module: object) -> str:
    """Where one of the scripts is inside."""
    return f"{PLACE}/{Path(str(vars(module)['__file__'])).name}"


SERVER_COMMAND = (*LOADED_PYTHON, "-I", "-S", "-B", script(child_entry), f"{script(command_server)}:serve")
INTERPRETER_COMMAND = (*LOADED_PYTHON, "-E", "-B", "-u", script(child_entry), f"{script(interpreter_process)}:serve")


@cache
def interpreter_files() -> Mapping[str, str]:
    """The interpreter, its loader, its libraries and the scripts, by their paths inside. Raises OSError."""
    places: dict[str, str] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        if found := MAPPED.search(line.rpartition(" ")[2]):
            places["loader" if found["name"].startswith("ld-") else "libc"] = found[0]
    if "loader" not in places:
        raise OSError("the loader of this Python cannot be found, which boxes with a `root` need")
    libraries = os.path.dirname(os.path.realpath(places.get("libc", places["loader"])))
    return {
        f"{PLACE}/loader": os.path.realpath(places["loader"]),
        f"{PLACE}/libraries": libraries,
        f"{PLACE}/python": os.path.realpath(sys.base_prefix),
        **SCRIPTS,
    }

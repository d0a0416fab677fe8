"""A root of this machine's own programs, for boxes that need no image."""

from __future__ import annotations

import re
import shutil
import tarfile
from contextlib import suppress

from gateway.errors import ConfigError
from gateway.process.spawn import CommandError, run_command
from gateway.sandbox.roots import add_root, find_root
from trainer.storage.temporary_folder import TemporaryFolder

ROOT = "mtrl-shell"
PROGRAMS = (
    "bash", "cat", "chmod", "cp", "cut", "diff", "echo", "env", "find", "grep", "head", "ls", "mkdir", "mv", "rm",
    "sed", "sh", "sort", "tail", "tr", "uniq", "wc", "xargs",
)  # fmt: skip
"""What every Debian has."""
LIST_S = 60.0
LIBRARY = re.compile(r"(/\S+) \(0x")


def make_machine_root() -> str:
    """Makes the root of this machine's own programs and their libraries, if there is none; returns its name."""
    with suppress(ConfigError):
        return find_root(ROOT).name
    found = {name: shutil.which(name) for name in PROGRAMS}
    if missing := ", ".join(name for name, path in found.items() if path is None):
        raise ConfigError(f"the shell tasks need programs that are not installed: {missing}", remedy="install them")
    try:
        listed = run_command(("ldd", *filter(None, found.values())), LIST_S).text
    except (OSError, CommandError) as error:
        raise ConfigError(f"the libraries of programs cannot be listed: {error}", remedy="install `ldd`") from error
    places = {f"/bin/{name}": path for name, path in found.items()} | {path: path for path in LIBRARY.findall(listed)}
    with TemporaryFolder() as temporary:
        archive = temporary.path / "root.tar"
        with tarfile.open(archive, "w", dereference=True) as tar:
            for place, path in places.items():
                tar.add(str(path), place)
        try:
            add_root(ROOT, archive)
        except ConfigError:
            find_root(ROOT)  # Another process was first.
    return ROOT

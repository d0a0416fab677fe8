"""Where a program of this machine is installed, so that it can be seen in a sandbox: its folder, its interpreter's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.sandbox.sandbox_layout import SYSTEM_FOLDERS

LIBRARIES = ("lib/python*", "lib/node_modules")
"""What the folder of an interpreter has beside its `bin`."""
FIRST_LINE, MOST_PROGRAMS = 512, 4


def is_of_system(file: Path) -> bool:
    """Whether each sandbox that has no root of its own sees it anyway."""
    return any(map(file.is_relative_to, SYSTEM_FOLDERS))


def find_program_paths(program: Path) -> Iterator[str]:
    """The installation of a program, and of the interpreters that run it."""
    for each in find_interpreters(program):
        yield from find_installation(each)


def find_interpreters(program: Path, path: str | None = None, most: int = MOST_PROGRAMS) -> Iterator[Path]:
    """The program, the interpreter that its first line names, that one's, and so on; `path` is where they are found."""
    yield program
    words = [word for word in read_interpreters(program) if not word.endswith("/env")]
    if words and most > 1:
        yield from find_interpreters(Path(shutil.which(words[0], path=path) or words[0]), path, most - 1)


def read_interpreters(program: Path) -> list[str]:
    """The interpreter that a program's first line names; `env` before the one that it finds. Empty if there is none."""
    with suppress(OSError), program.open("rb") as file:
        start, _, line = file.read(FIRST_LINE).partition(b"\n")[0].decode("utf-8", "replace").partition("#!")
        words = [] if start else [word for word in line.replace("\t", " ").split(" ") if word not in ("", "-S")]
        return words[: 2 if words and words[0].endswith("/env") else 1]
    return []


def find_installation(program: Path) -> Iterator[str]:
    """The program with its folder of Python or Node.js, before and after links are followed."""
    for file in dict.fromkeys((program, program.resolve())):
        if is_of_system(file):
            continue
        modules = next((str(path) for path in reversed(file.parents) if path.name == "node_modules"), "")
        yield modules or str(file)
        prefix = file.parent.parent
        if any(next(prefix.glob(pattern), None) for pattern in LIBRARIES):
            yield from (str(path) for name in ("bin", "lib", "pyvenv.cfg") if (path := prefix / name).exists())

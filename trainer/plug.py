"""A name in settings becomes a Python object of the user's own: of an installed module, or of a file at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gateway.config.find import find
from gateway.errors import ConfigError


def plug_in(name: str, field: str, folder: Path | None = None) -> Any:
    """By `module:name`; or by `plugins.py:name`, whose folder can be imported from then on.

    A path that is relative begins at `folder`, or else where the command was started.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        return find(name, None, field)
    file = (folder or Path()) / path
    if not file.is_file():
        raise ConfigError("there is no such file", file=file, field=field, remedy="correct the path")
    found = find(f"{file.stem}:{attribute}", file, field)
    place = getattr(sys.modules[file.stem], "__file__", None)
    if place is None or Path(place).resolve() != file.resolve():
        problem = f"a module named {file.stem!r} is there already ({place or 'built in'})"
        raise ConfigError(problem, file=file, field=field, remedy="give the file another name")
    return found

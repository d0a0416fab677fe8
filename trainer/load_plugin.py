"""Loads a user's object that settings name as `module:name` or `path/file.py:name`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gateway.config.load_object import load_object
from gateway.errors import ConfigError


def load_plugin(name: str, field: str, folder: Path | None = None) -> Any:
    """Loads `module:name`, or `plugins.py:name`, whose folder becomes importable.

    A relative path starts at `folder`, or else at the working directory.
    """
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        return load_object(name, None, field)
    file = (folder or Path()) / path
    if not file.is_file():
        raise ConfigError("there is no such file", file=file, field=field, remedy="correct the path")
    plugin = load_object(f"{file.stem}:{attribute}", file, field)
    loaded_from = getattr(sys.modules[file.stem], "__file__", None)
    if loaded_from is None or Path(loaded_from).resolve() != file.resolve():
        problem = f"a module named {file.stem!r} is there already ({loaded_from or 'built in'})"
        raise ConfigError(problem, file=file, field=field, remedy="give the file another name")
    return plugin

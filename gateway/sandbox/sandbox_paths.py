"""Resolves the paths of the machine that settings name, and refuses those that cover what a sandbox has of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.errors import ConfigError
from gateway.sandbox.sandbox_layout import MEMORY_FOLDERS, MORE_SYSTEM_FILES, PROXY_SOCKET, SYSTEM_FOLDERS
from gateway.sandbox.sandbox_settings import PATHS, SandboxSettings

OWN_PLACES = ("/proc", "/sys", "/dev", *MEMORY_FOLDERS, PROXY_SOCKET)
KERNEL_FOLDERS = {"readable": ("/proc", "/dev"), "writable": ("/proc", "/dev", "/sys")}
"""Folders in which the kernel shows the machine, below which nothing may be named."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder of files like others
REMEDY = "name the folder in it that is needed"


def resolve_paths(folder: Path, settings: SandboxSettings, file: object, field: str) -> SandboxSettings:
    """The settings with absolute paths: those of a file are relative to its folder. Raises ConfigError."""
    update = {name: tuple(folder / path.expanduser() for path in getattr(settings, name)) for name in PATHS}
    for name, paths in update.items():
        for path in paths:
            problem = _find_problem(name, path)
            if not problem and settings.provider is not None:
                problem = settings.provider.find_path_problem(path)
            if problem:
                raise ConfigError(f"{path}: {problem}", file=file, field=f"{field}.{name}", remedy=REMEDY)
    return settings.model_copy(update=update)


def _find_problem(name: str, path: Path) -> str:
    """Why a path cannot be seen inside; empty if it can. A link must not lead to such a path either."""
    for place in _places(path):
        covered = [own for own in OWN_PLACES if Path(own).is_relative_to(place)]
        if name == "writable":
            covered += [own for own in (*SYSTEM_FOLDERS, *MORE_SYSTEM_FILES) if Path(own).is_relative_to(place)]
        if covered:
            return f"it covers {covered[0]}, which a sandbox has of its own"
        if not place.is_relative_to(SHARED_MEMORY) and any(map(place.is_relative_to, KERNEL_FOLDERS[name])):
            return "it shows the kernel of the machine, or is a device"
    return ""


def _places(path: Path) -> Iterator[Path]:
    """Where a path is seen inside, and what is seen there."""
    yield Path(os.path.normpath(path))
    with suppress(OSError):  # Who may not follow a link cannot have it mounted.
        yield Path(os.path.realpath(path))

"""Folders that all processes of a test run share: the first that needs one builds it, the others wait for it."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

VARIABLE = "MTRL_TEST_SHARED"
"""Names the folder of shared folders. Who sets it keeps it: what is built once is then there for the next run."""


def open_shared_folder() -> Path:
    """The folder of shared folders; workers and other child processes inherit it, and who made it removes it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = mkdtemp(prefix="mtrl-shared-")
        atexit.register(_remove, os.environ[VARIABLE], os.getpid())
    return Path(os.environ[VARIABLE])


def build_once(name: str, build: Callable[[Path], object]) -> Path:
    """The shared folder of this name; `build` fills it if no process of this run has done so."""
    root = open_shared_folder()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = Path(mkdtemp(dir=root))
            build(unfinished)
            unfinished.rename(folder)
    return folder


def _remove(folder: str, owner: int) -> None:
    """Not in a fork of the owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)

"""Overlays over large prepared states, from which the processes of servers begin without a copy.

The process enters a namespace of its own, mounts the overlay at its rollout's folder (`state_mount.py`), and becomes
the server. No mount outlives it, and nobody else sees it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gateway.config.models import Server
from gateway.process.spawn import run_command
from gateway.sandbox import state_mount
from gateway.state.prepared_state import find_full_copy

COMMAND = (sys.executable, "-I", "-S", "-B", state_mount.__file__)
PROBE_S = 20.0
SANDBOX_USER = 65_534
"""Whom a probe gives a state to, as each sandbox has a user of its own."""


@dataclass(frozen=True, slots=True)
class RolloutFolder:
    """The folder of one process, if it uses one."""

    path: Path | None = None
    state: Path | None = None
    """The prepared state over which the process mounts an overlay there; None where the folder has a copy, or none."""

    def has(self, path: Path | None) -> bool:
        """Whether a path is in the folder."""
        return path is not None and self.path is not None and path.is_relative_to(self.path)

    def mount_first(self, command: tuple[str, ...], cwd: Path | None, user: int = 0) -> tuple[str, ...]:
        """The command after the overlay was mounted, if there is one, with its files as the user's. A `cwd` inside the
        folder is made and entered."""
        if self.path is None or self.state is None:
            return command
        inside = str(cwd) if self.has(cwd) else ""
        return (*_mount_command(self.state, self.path, user, inside), *command)


def find_copy_reason(config: Server, state: Path) -> str:
    """Why a server's rollouts get copies of a state and no overlay over it; empty if they get one.

    It is found once for each state. Raises OSError where the state cannot be read.
    """
    if config.keep_state is not None:
        return "`keep_state` keeps whole copies"
    if config.isolation == "sandbox":
        return _find_reason(state.resolve(), SANDBOX_USER, config.sandbox.disk_mb)
    return _find_reason(state.resolve(), 0, None)


@cache
def _find_reason(state: Path, user: int, disk_mb: int | None) -> str:
    copy = find_full_copy(state)
    if not copy.reason:
        return "its blocks are shared"
    if not copy.is_large:
        return "it is small"
    if not state.is_dir():
        return "it is an archive"
    if disk_mb is not None and copy.largest > disk_mb * 2**20:  # No process may write as much, not even to change it.
        return f"it has a file of more than {disk_mb} MB, the sandbox's `disk_mb`"
    if disk_mb is not None and state.stat().st_dev != os.stat(tempfile.gettempdir()).st_dev:
        # Removed files that are still open have the number of another file system then, and would not be counted.
        return f"it lies on another file system than {tempfile.gettempdir()}, where `disk_mb` could not be held to"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only a gateway of root can mount an overlay in which prepared folders can be renamed"
    with tempfile.TemporaryDirectory(prefix="mtrl-state-") as folder:
        words = _mount_command(state, Path(folder), user, is_probe=True)
        try:
            done = run_command(words, PROBE_S)
        except OSError as error:
            return str(error)
    return "" if done.status == 0 else done.error_text or "no overlay can be mounted"


def _mount_command(state: Path, folder: Path, user: int, cwd: str = "", *, is_probe: bool = False) -> tuple[str, ...]:
    values = {"folder": str(folder), "state": str(state), "user": user, "cwd": cwd, "probe": is_probe}
    return (*COMMAND, json.dumps(values))

"""Control groups (version 2) of sandboxes: limits on memory, processes and CPU that hold for all of a sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_hex

from gateway.sandbox.sandbox_settings import SandboxSettings

MOUNTS, OWN_GROUP = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
PREFIX = "mtrl-sandbox-"
OWN_PROCESSES = 8
"""Processes of bubblewrap and of the server of commands, which are in the group too."""
CPU_PERIOD_US = 100_000
OPTIONAL = ("memory.swap.max", "cpu.max")
"""Files that groups do not have on every machine."""
NOT_WRITABLE = "control groups cannot be written"
REMOVE_S = 2.0
"""How long killed processes may stay in a group."""
FIRST_REMOVE_POLL_S, REMOVE_POLL_S = 0.0002, 0.003


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one sandbox."""

    folder: Path | None = None
    problem: str = ""
    """Why there is none."""

    def hits(self) -> dict[str, int]:
        """How often the limits on memory and processes were hit."""
        killed, is_own = self._count_killed()
        processes = _read_counts(self.folder / "pids.events") if self.folder else {}
        return {"memory": killed if is_own else 0, "processes": processes.get("max", 0)}

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether processes were ended since the machine has no memory left, and not at the group's own limit."""
        killed, is_own = self._count_killed()
        return killed > 0 and not is_own

    def _count_killed(self) -> tuple[int, bool]:
        """How many processes were ended for their memory, and whether the limit was ever hit: that is counted first."""
        counts = _read_counts(self.folder / "memory.events") if self.folder else {}
        return counts.get("oom_kill", 0), counts.get("oom", 0) > 0


def remove_group(folder: Path, wait_s: float = 0.0) -> bool:
    """Kills the processes of a group and removes it; whether it is gone."""
    deadline, pause_s = time.monotonic() + wait_s, FIRST_REMOVE_POLL_S
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except OSError:
            _kill_processes(folder)
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, REMOVE_POLL_S)
        else:
            return True


def _kill_processes(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                os.kill(int(pid), 9)


def make_group(settings: SandboxSettings) -> Cgroup:
    """A group with the limits of the settings; without a folder where none can be made here."""
    if (parent := find_parent()) is None:
        return Cgroup(problem=NOT_WRITABLE)
    folder = parent / f"{PREFIX}{os.getpid()}-{token_hex(6)}"
    limits = {
        "memory.max": str(settings.memory_mb * 2**20),
        "memory.swap.max": "0",
        "pids.max": str(settings.processes + OWN_PROCESSES),
        "cpu.max": f"{int(settings.cpus * CPU_PERIOD_US)} {CPU_PERIOD_US}",
    }
    try:
        folder.mkdir()
        for name, text in limits.items():
            if name not in OPTIONAL or (folder / name).exists():
                (folder / name).write_text(text)
    except OSError as error:
        remove_group(folder)
        return Cgroup(problem=f"a control group could not be made: {error.strerror}: {parent}")
    return Cgroup(folder)


@cache
def find_parent() -> Path | None:
    """The nearest group above this process in which groups can be made that limit memory and processes.

    A group that has processes passes no controllers on, so that its parents are tried.
    """
    for mount, own in _mounts():
        folder = mount / own
        for candidate in (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))):
            if _can_make_groups(candidate):
                return candidate
    return None


def _mounts() -> Iterator[tuple[Path, str]]:
    """Where groups are mounted, and the group of this process below that."""
    with suppress(OSError):
        own = next((line[3:] for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")), "/")
        for line in MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if after.split()[0] == "cgroup2":
                root, mount = before.split()[3:5]
                yield Path(mount), own.removeprefix(root.rstrip("/")).lstrip("/")


def _can_make_groups(folder: Path) -> bool:
    """Tries it: a folder's mode says little where the file system is mounted read-only."""
    trial = folder / f"{PREFIX}trial-{token_hex(6)}"
    try:
        passed_on = (folder / "cgroup.subtree_control").read_text().split()
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return {"memory", "pids"} <= {*passed_on}


def _read_counts(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) == 2 and words[1].isdigit()}

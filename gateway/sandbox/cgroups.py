"""Control groups of sandboxes, version 1 and 2: limits on memory, processes and CPU that hold for all of a sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from secrets import token_hex

from gateway.sandbox.sandbox_settings import SandboxSettings

MOUNTS, OWN_GROUPS = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
PREFIX = "mtrl-sandbox-"
OWN_PROCESSES = 8
"""Processes of bubblewrap and of the server of commands, which are in the group too."""
CPU_PERIOD_US = 100_000
NOT_WRITABLE = "control groups cannot be written"
REMOVE_S = 2.0
"""How long killed processes may stay in a group."""
FIRST_REMOVE_POLL_S, REMOVE_POLL_S = 0.0002, 0.003


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which groups can be made, and the controllers that they have."""

    folder: Path
    version: int
    controllers: tuple[str, ...]


@dataclass(slots=True)
class Cgroup:
    """The folders of one sandbox's group: one in version 2, one for each controller in version 1."""

    folders: dict[str, Path] = field(default_factory=dict)
    """By controller."""
    problem: str = ""
    """Why there are none."""

    @property
    def unique_folders(self) -> list[Path]:
        return list(dict.fromkeys(self.folders.values()))

    @property
    def process_files(self) -> list[str]:
        """The files by which a process of one thread joins.

        In version 1, one thread that joins by itself waits for nothing; a whole process waits until no process of the
        machine can be in the midst of a fork, which takes some milliseconds.
        """
        files = ((folder / "tasks", folder / "cgroup.procs") for folder in self.unique_folders)
        return [str(tasks if tasks.exists() else processes) for tasks, processes in files]

    def hits(self) -> dict[str, int]:
        """How often the limits on memory and processes were hit."""
        memory, processes = self.folders.get("memory"), self.folders.get("pids")
        counts = {"memory": 0, "processes": 0}
        if memory is not None:
            events = _read_counts(memory / "memory.events") or _read_counts(memory / "memory.oom_control")
            counts["memory"] = events.get("oom_kill", 0)
        if processes is not None:
            counts["processes"] = _read_counts(processes / "pids.events").get("max", 0)
        return counts

    def remove(self) -> bool:
        """Kills what is left and removes the folders; whether all are gone."""
        gone = [remove_group(folder) for folder in self.unique_folders]
        return all(gone)


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
    """A group with the limits of the settings, as far as groups can be made here; without folders where they cannot."""
    group, name = Cgroup(), f"{PREFIX}{os.getpid()}-{token_hex(6)}"
    if not (hierarchies := find_hierarchies()):
        return Cgroup(problem=NOT_WRITABLE)
    try:
        for hierarchy in hierarchies:
            folder = hierarchy.folder / name
            folder.mkdir()
            group.folders |= dict.fromkeys(hierarchy.controllers, folder)
            for file, text in _limits(hierarchy, settings).items():
                _write(folder / file, text)
    except OSError as error:
        group.remove()
        return Cgroup(problem=f"a control group could not be made: {error.strerror}: {hierarchy.folder}")
    return group


def _write(file: Path, text: str) -> None:
    """Writes a file of a group. Not every kernel counts what is swapped out: it has no such file then."""
    may_be_missing = "sw" in file.name
    try:
        descriptor = os.open(file, os.O_WRONLY if may_be_missing else os.O_WRONLY | os.O_CREAT)
    except FileNotFoundError:
        if may_be_missing:
            return
        raise
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _limits(hierarchy: Hierarchy, settings: SandboxSettings) -> dict[str, str]:
    """The texts of the files of a new group."""
    memory, processes = settings.memory_mb * 2**20, settings.processes + OWN_PROCESSES
    quota = str(int(settings.cpus * CPU_PERIOD_US))
    files: Mapping[tuple[str, int], dict[str, str]] = {
        ("memory", 1): {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)},
        ("memory", 2): {"memory.max": str(memory), "memory.swap.max": "0"},
        ("pids", 1): {"pids.max": str(processes)},
        ("pids", 2): {"pids.max": str(processes)},
        ("cpu", 1): {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota},
        ("cpu", 2): {"cpu.max": f"{quota} {CPU_PERIOD_US}"},
    }
    wanted: dict[str, str] = {}
    for controller in hierarchy.controllers:
        wanted |= files[controller, hierarchy.version]
    return wanted


@cache
def find_hierarchies() -> tuple[Hierarchy, ...]:
    """Where groups can be made that limit memory and processes; empty if that is not possible."""
    found: dict[str, Hierarchy] = {}
    for hierarchy in _mounted_hierarchies():
        for controller in hierarchy.controllers:
            found.setdefault(controller, hierarchy)
    if not {"memory", "pids"} <= found.keys():
        return ()
    unique = {hierarchy.folder: hierarchy for hierarchy in found.values()}
    return tuple(unique.values())


def _mounted_hierarchies() -> Iterator[Hierarchy]:
    """The hierarchies of this process, in which a group can be made."""
    with suppress(OSError):
        own = dict(_own_groups())
        for line in MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            (root, mount), kind, options = before.split()[3:5], after.split()[0], after.split()[-1]
            if kind == "cgroup2":
                yield from _version_2(Path(mount), _inside(own.get("", "/"), root))
            elif kind == "cgroup":
                controllers = tuple(name for name in ("memory", "pids", "cpu") if name in options.split(","))
                group = own.get(controllers[0], "/") if controllers else "/"
                folder = Path(mount) / _inside(group, root)
                if controllers and _can_make_groups(folder):
                    yield Hierarchy(folder, 1, controllers)


def _version_2(mount: Path, own: str) -> Iterator[Hierarchy]:
    """The nearest group that passes its controllers on. One that has processes cannot, so that parents are tried."""
    folder = mount / own
    for candidate in (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))):
        passed_on = _read_words(candidate / "cgroup.subtree_control")
        if {"memory", "pids"} <= passed_on and _can_make_groups(candidate):
            yield Hierarchy(candidate, 2, tuple(name for name in ("memory", "pids", "cpu") if name in passed_on))
            return


def _own_groups() -> Iterator[tuple[str, str]]:
    """The group of this process by controller; version 2 has no name."""
    for line in OWN_GROUPS.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        for name in controllers.split(","):
            yield name, group


def _inside(group: str, root: str) -> str:
    """A group's path below the root that is mounted."""
    return group.removeprefix(root.rstrip("/")).lstrip("/")


def _can_make_groups(folder: Path) -> bool:
    """Tries it: a folder's mode says little where the file system is mounted read-only."""
    trial = folder / f"{PREFIX}trial-{token_hex(6)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return True


def _read_words(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()


def _read_counts(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) == 2 and words[1].isdigit()}

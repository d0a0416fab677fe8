"""Which paths of the machine a sandbox has, and where its folders in memory are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache")
"""What programs need to run at all."""
MORE_SYSTEM_FILES = ("/etc/alternatives", "/etc/mime.types", "/etc/fonts", "/etc/localtime")
COPIED_FILES = {3: "/etc/ld.so.cache", 4: "/etc/mime.types"}
"""Small files of the system, by the descriptors from which bubblewrap copies them: a copy costs less than a mount."""
CERTIFICATES = "/etc/ssl/certs"
"""Needed only where hosts are reached."""
ROLLOUT = "/rollout"
"""The working folder inside, in memory: it is gone with the sandbox."""
PROXY_SOCKET = "/run/mtrl-proxy"
"""How the socket files are called, inside, by which listening sockets are handed over."""
MEMORY_FOLDERS = (ROLLOUT, "/tmp", "/dev/shm")  # noqa: S108 - inside
STATE_PLACES = ("/mnt", "/media", "/srv", "/opt", "/home")


def inside_socket(port: int) -> str:
    """The socket file, inside, by which the socket that listens on a port is handed over."""
    return f"{PROXY_SOCKET}-{port}"


@dataclass(frozen=True, slots=True)
class SandboxLayout:
    """The paths of this machine that a sandbox has."""

    readable: tuple[str, ...]
    writable: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """Links of the system into its folders, with their targets: a link costs less than a mount."""
    copied: tuple[str, ...]
    """Files of the system that are copied."""
    parents: tuple[str, ...]
    """The folders above all these."""
    shared_memory_folders: tuple[str, ...]
    """Folders in memory in which some of them are seen. They are made before these, by bubblewrap, which cannot limit
    how many files they may have."""

    @property
    def own_memory_folders(self) -> tuple[str, ...]:
        return tuple(folder for folder in MEMORY_FOLDERS if folder not in self.shared_memory_folders)

    def find_state_place(self, others: Sequence[str]) -> str:
        """A folder of the machine that the sandbox does not need: its state is mounted there, seen by nobody else."""
        used = [Path(path) for path in (*self.readable, *self.writable, *others)]
        for place in STATE_PLACES:
            if os.path.isdir(place) and not any(path.is_relative_to(place) for path in used):
                return place
        raise OSError(f"{', '.join(STATE_PLACES)} are all in use, in one of which a `state` is mounted for a sandbox")


@lru_cache(maxsize=256)
def make_layout(
    system: tuple[str, ...], needed: tuple[str, ...], named: tuple[str, ...], writable: tuple[str, ...]
) -> SandboxLayout:
    """The layout; of what is there anyway, the outermost folders."""
    links = {path: target for path in system if (target := _system_target(path))}
    copied = tuple(path for path in system if path in COPIED_FILES.values())
    there = {path: Path(path).parents for path in (*system, *needed) if path not in (*links, *copied)}
    readable = [path for path, parents in there.items() if there.keys().isdisjoint(map(str, parents))]
    paths = [Path(path) for path in (*readable, *named, *writable)]
    parents = {parent for path in (*paths, *map(Path, (*links, *copied))) for parent in path.parents} - {Path("/")}
    shared = tuple(folder for folder in MEMORY_FOLDERS if any(path.is_relative_to(folder) for path in paths))
    return SandboxLayout(
        (*readable, *named), writable, tuple(links.items()), copied, tuple(map(str, sorted(parents))), shared
    )


def _system_target(path: str) -> str:
    """Where a link of the system leads that stays in its first folder; empty for what is no such link."""
    target = os.path.realpath(path)
    return target if os.path.islink(path) and target.startswith(f"{SYSTEM_FOLDERS[0]}/") else ""

"""Limits how much folders of the machine may grow that a sandbox writes to: a sandbox that passes a limit is ended.

Few file systems have quotas that a gateway may set, so a thread looks at the folders twice a second. A program may pass
the limit for that long. It cannot take space at once, since the filter of system calls refuses `fallocate`.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

BLOCK_BYTES = 512
LOOK_S = 0.5
LOOK_SHARE = 3.0
"""A pause is at least this many times as long as the look before it."""
DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What folders have."""

    bytes: int = 0
    files: int = 0
    hidden: int = 0
    """Folders and processes that cannot be looked into."""


def measure(folders: Sequence[str], first_process: int | None = None) -> DiskUse:
    """What folders have, with files that processes hold open after they were removed."""
    sizes: dict[tuple[int, int], int] = {}
    files = hidden = 0
    for entry in _walk(folders):
        files += 1
        if entry is None:
            hidden += 1
        else:
            sizes[entry.st_dev, entry.st_ino] = entry.st_blocks * BLOCK_BYTES
    devices = {device for device, _ in sizes}
    mapped = 0
    for pid in _descendants(first_process) if first_process else ():
        try:
            for state in _open_files(pid):
                if not state.st_nlink and state.st_dev in devices and stat.S_ISREG(state.st_mode):
                    sizes[state.st_dev, state.st_ino] = state.st_blocks * BLOCK_BYTES
            mapped += _mapped_bytes(pid, folders)
        except PermissionError:
            hidden += pid != first_process  # Process 1 is ours.
    return DiskUse(sum(sizes.values()) + mapped, files, hidden)


def _walk(folders: Sequence[str]) -> Iterator[os.stat_result | None]:
    """The state of each file and folder; None for a folder that cannot be read, or that lies too deep."""
    waiting = list(folders)
    for folder in folders:
        with suppress(OSError):
            yield os.lstat(folder)
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            yield None


def _descendants(pid: int) -> Iterator[int]:
    """A process and what came from it: process 1 of a sandbox adopts the others."""
    waiting = [pid]
    while waiting:
        yield (process := waiting.pop())
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                waiting += map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(FileNotFoundError, ProcessLookupError):
                yield os.stat(entry.path)


def _mapped_bytes(pid: int, folders: Sequence[str]) -> int:
    """Bytes of removed files in folders that a process has mapped, which it need not hold open."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            words = line.split(None, 5)
            if len(words) == 6 and words[5].endswith(DELETED) and words[5].startswith(tuple(folders)):
                first, _, last = words[0].partition("-")
                total += int(last, 16) - int(first, 16)
    return total


@dataclass(slots=True)
class WatchedDisk:
    """The folders of one sandbox, with what they had at its start."""

    folders: Sequence[str]
    max_bytes: int
    max_files: int
    find_first_process: Callable[[], int | None] = lambda: None
    """Finds the process with which everything in the sandbox ends."""
    kill: Callable[[], object] | None = None
    """Ends the sandbox where the gateway may not look at its processes, as those of a container engine. Files that they
    hold open after they were removed are not seen then."""
    before: DiskUse = field(default_factory=DiskUse)
    problem: str = ""
    """Why the sandbox was ended."""
    _was_hidden: bool = False

    def look(self) -> None:
        """Ends the sandbox if its folders have grown too much."""
        if self.kill is not None:
            if not self.problem and (problem := self._find_problem(measure(self.folders))):
                self.problem = problem
                threading.Thread(target=self.kill, name="disk-watch-kill", daemon=True).start()  # It takes time.
            return
        pid = self.find_first_process()
        with suppress(OSError):
            if pid is None or os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid"):
                return  # It has not started, or has ended.
            process = os.pidfd_open(pid)
            try:
                problem = self._find_problem(measure(self.folders, pid))
                if problem and not self.problem:
                    self.problem = problem
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)

    def _find_problem(self, now: DiskUse) -> str:
        if now.bytes - self.before.bytes > self.max_bytes:
            return f"it wrote more than {self.max_bytes // 2**20} MB to folders of the machine"
        if now.files - self.before.files > self.max_files:
            return f"it made more than {self.max_files} files in folders of the machine"
        was_hidden, self._was_hidden = self._was_hidden, now.hidden > self.before.hidden
        if was_hidden and self._was_hidden:  # Not of a process that ends just now.
            return "it hid what it wrote to folders of the machine, so that it could not be measured"
        return ""


class DiskWatch:
    """The thread that looks at the folders of all sandboxes of this process, while there are any."""

    def __init__(self) -> None:
        self._watched: list[WatchedDisk] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, disk: WatchedDisk) -> None:
        """Begins to watch. What the folders have now is measured here, which takes time where that is much."""
        disk.before = measure(disk.folders)
        with self._lock:
            self._watched.append(disk)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)
                self._thread.start()

    def remove(self, disk: WatchedDisk) -> None:
        """Ends the watch."""
        with self._lock:
            self._watched = [other for other in self._watched if other is not disk]

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            with self._lock:
                watched = self._watched
                if not watched:
                    self._thread = None
                    return
            for disk in watched:
                with self._lock:
                    is_watched = disk in self._watched
                if is_watched:
                    disk.look()
            time.sleep(max(LOOK_S, LOOK_SHARE * (time.monotonic() - began)))


DISK_WATCH = DiskWatch()

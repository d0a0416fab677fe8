"""Temporary folders on disks that stay: what a killed process left is removed by the next process that makes one there.

The writer of a folder holds a lock (`flock`) on a file in it, which ends with the process, however that ends. Some
shared file systems keep such locks on each machine for itself, and do not say so. A lock that can be taken therefore
proves that the writer is gone only where it was a process of this kernel, by the same mount; other folders have to be
older than any writer could be, too.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

LOCK = ".mtrl-writer"
"""The locked file, which says where its writer runs. A folder without it is nobody's to remove."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ABANDONED_S = 24 * 3600.0
"""Longer than any publish of weights, for which servers load at least 200 MB in a second, or build of a demo model."""


class TemporaryFolder:
    """A new folder in `root`, which is the system's folder for temporary files by default."""

    def __init__(self, root: Path | None = None, prefix: str = "") -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root)).absolute()
        self._lock = -1
        try:
            self._write_lock()
        except BaseException:
            self.remove()
            raise
        self._remove_abandoned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the folder, as far as that is possible."""
        if self._lock >= 0:
            os.close(self._lock)  # First: NFS keeps a removed file's name as long as it is open.
            self._lock = -1
        _remove(self.path)

    def _remove_abandoned(self) -> None:
        with suppress(OSError):  # They are in the way of nothing.
            for folder in self.path.parent.iterdir():
                if folder != self.path and _is_abandoned(folder, self.path):
                    _remove(folder)

    def _write_lock(self) -> None:
        """Gives the file its name once it is locked: nobody finds it in between."""
        new = self.path / f"{LOCK}.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        if _take(self._lock):
            os.write(self._lock, _place_of(self.path))
        new.rename(self.path / LOCK)


def _take(lock: int) -> bool | None:
    """Whether the lock could be taken; None where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _place_of(folder: Path) -> bytes:
    """The kernel and mount that this process sees the folder by. Processes of one such place see each other's locks."""
    try:
        kernel = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        kernel = platform.node()
    return f"{kernel} {folder.stat().st_dev}".encode()


def _is_abandoned(folder: Path, own: Path) -> bool:
    """Whether a folder beside our own was left by a process that is gone. Both ages are by the clock of the disk."""
    try:
        status, ours = folder.lstat(), own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != ours.st_uid:
            return False  # In a folder that anybody may write to, a link or another user's.
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # No such folder, or one that its writer has just removed.
        return False
    try:
        is_free = _take(lock)
        if is_free and os.read(lock, 200) == _place_of(own):
            return True
        age_s = (own / LOCK).stat().st_mtime - os.fstat(lock).st_mtime
        return is_free is not False and age_s > ABANDONED_S
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Removes a folder, its lock last: what an error leaves is found again."""
    with suppress(OSError):
        for item in folder.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            elif item.name != LOCK:
                item.unlink()
        shutil.rmtree(folder)

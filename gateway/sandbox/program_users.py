"""Users for the programs of gateways of root: no two programs on a machine have the same one at the same time.

A process may signal and trace others of its user. Several gateways share the numbers, so each number in use is locked
by a file in a folder of root; the lock ends with the gateway, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from gateway.errors import GatewayError, Unavailable

UNUSED_USERS = range(60_578, 61_184)
"""Numbers of users that no distribution gives to anybody."""
LOCK_FOLDERS = ("/run/mtrl-users", "/var/lib/mtrl-users")
"""Where the locks may be; else in the folder for temporary files."""
_users = cycle(UNUSED_USERS)


@contextmanager
def unused_user() -> Iterator[int]:
    """The number of a user that is nobody else's during the block."""
    folder = _lock_folder()
    for user in islice(_users, len(UNUSED_USERS)):
        lock = os.open(folder / str(user), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if _take(lock):
                yield user
                return
        finally:
            os.close(lock)
    remedy = f"run fewer programs at once: {len(UNUSED_USERS)} of them run on this machine"
    raise Unavailable(f"no user is left that a program could run as\n  remedy: {remedy}")


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _lock_folder() -> Path:
    for name in (*LOCK_FOLDERS, f"{tempfile.gettempdir()}/mtrl-users"):
        folder = Path(name)
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_private(folder.lstat()):
                return folder
    problem = "there is no folder for the locks of users that programs run as"
    raise GatewayError(f"{problem}\n  remedy: create {LOCK_FOLDERS[0]}, which only root may read and write")


def _is_private(state: os.stat_result) -> bool:
    """Whether a folder is root's alone; anybody may have made one of that name, or a link."""
    return stat.S_ISDIR(state.st_mode) and state.st_uid == 0 and not stat.S_IMODE(state.st_mode) & 0o077

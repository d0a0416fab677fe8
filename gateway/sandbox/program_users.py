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
from itertools import count, islice
from pathlib import Path

from gateway.errors import GatewayError, Unavailable

UNUSED_USERS = (*range(60_578, 61_184), *range(65_537, 100_000))
"""Numbers of users that no distribution gives to anybody; those of users in containers begin at 100,000."""
USER_MAP = Path("/proc/self/uid_map")
LOCK_FOLDERS = ("/run/mtrl-users", "/var/lib/mtrl-users")
"""Where the locks may be; else in the folder for temporary files."""
_next = count()


@cache
def usable_users() -> tuple[int, ...]:
    """Those of the unused users that exist here: a container may have the first 65,536 numbers only."""
    rows = [[int(word) for word in line.split()] for line in USER_MAP.read_text().splitlines()]
    return tuple(user for user in UNUSED_USERS if any(first <= user < first + length for first, _, length in rows))


@contextmanager
def unused_user() -> Iterator[int]:
    """The number of a user that is nobody else's during the block."""
    folder, users = _lock_folder(), usable_users()
    for index in islice(_next, len(users)):
        user = users[index % len(users)]
        lock = os.open(folder / str(user), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if try_lock(lock):
                yield user
                return
        finally:
            os.close(lock)
    problem = f"{len(users)} programs of gateways run on this machine, as many as there are users for them"
    raise Unavailable(f"no user is left that a program could run as: {problem}\n  remedy: run fewer at once")


def try_lock(descriptor: int) -> bool:
    """Whether a file's lock was free, and is held by this process now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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

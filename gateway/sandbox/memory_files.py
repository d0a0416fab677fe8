"""Files in memory by which bubblewrap and the shells around it are given what is on no command line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache


@cache
def shared_file(content: bytes) -> str:
    """The path of a file that sandboxes share, which is gone with this process."""
    return descriptor_path(open_file(content))


def open_file(content: bytes) -> int:
    """The descriptor of a new file."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def descriptor_path(descriptor: int) -> str:
    """The path by which other processes open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def join_options(options: Iterable[str]) -> bytes:
    """Options as bubblewrap reads them from a file; raises OSError for one that it would read as several."""
    given = [*options]
    if any("\0" in option for option in given):
        raise OSError("a path or a variable of the sandbox has a zero byte")
    return os.fsencode("\0".join(given))

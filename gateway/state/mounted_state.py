"""Opens the folder of a server whose state lies under an overlay, which only the server's processes see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_mounted(folder: Path, pid: int) -> Iterator[Path]:
    """The path of a folder as a process sees it, on which something is mounted there; valid within the block.

    Raises OSError where the process has ended or has nothing mounted there: its folder without the mount is no state.
    """
    descriptor = os.open(f"/proc/{pid}/root{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_dev == folder.stat().st_dev:
            raise OSError(f"nothing is mounted at {folder} for process {pid} any more")
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)

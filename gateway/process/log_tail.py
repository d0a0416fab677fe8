"""The end of what a child process printed, for messages about it. Standard library only."""

from __future__ import annotations

import os


class LogTail:
    """Keeps the last bytes of output that is read from a pipe, which would block a child that logs a lot."""

    def __init__(self, max_bytes: int = 8192) -> None:
        self._data, self._max_bytes = bytearray(), max_bytes

    def add(self, data: bytes) -> None:
        """Takes the next output."""
        self._data += data
        del self._data[: -self._max_bytes]

    @property
    def text(self) -> str:
        """The tail, without space around it."""
        return self._data.decode("utf-8", "replace").strip()


def read_tail(descriptor: int, max_bytes: int, since: int = 0) -> str:
    """The last bytes of a file that a child writes to, from the offset `since` on."""
    start = max(since, os.fstat(descriptor).st_size - max_bytes)
    return os.pread(descriptor, max_bytes, start).decode("utf-8", "replace").strip()

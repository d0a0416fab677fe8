"""The tail of what a server's processes wrote to standard error, kept across restarts for operators.

It is text of others: escape sequences are removed, and what could change how a terminal or a page reads is escaped.
"""

from __future__ import annotations

import re

MAX_LOG_BYTES = 16_384
"""How much is kept of each server."""
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[@-Z\\-_])")


class ServerLog:
    """The last output of one server's processes, the present one's at the end."""

    def __init__(self) -> None:
        self._tail = bytearray()
        self._was_cut = False

    def add(self, data: bytes) -> None:
        """Appends output, and drops the oldest of it."""
        self._tail += data
        if len(self._tail) > MAX_LOG_BYTES:
            del self._tail[:-MAX_LOG_BYTES]
            self._was_cut = True

    def note(self, text: str) -> None:
        """Appends a line of our own."""
        begins_line = not self._tail or self._tail.endswith(b"\n")
        self.add(f"{'' if begins_line else chr(10)}[{text}]\n".encode())

    @property
    def text(self) -> str:
        """The tail in whole lines."""
        tail = bytes(self._tail)
        if self._was_cut and b"\n" in tail:
            tail = tail.partition(b"\n")[2]
        text = _ESCAPE_SEQUENCE.sub("", tail.decode("utf-8", "replace").replace("\r\n", "\n"))
        return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text).rstrip()


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

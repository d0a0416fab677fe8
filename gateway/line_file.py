"""Reads files with one JSON value on each line, each line bounded, so that no file can fill the memory or the stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from gateway.bounded_json import loads

MAX_LINE_BYTES = 256 << 20
"""The longest line of our own files, such as rollouts and tapes, that is read."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file and where it stands."""

    number: int
    """From 1."""
    start: int
    end: int
    """The offset behind its line end."""
    data: bytes
    """The line with its line end; only its beginning if it is too long."""
    is_complete: bool
    """Whether it has a line end. A writer that was killed leaves a last line without one."""
    is_too_long: bool = False


def iterate_lines(
    stream: BinaryIO, start: int = 0, *, number: int = 1, max_bytes: int = MAX_LINE_BYTES
) -> Iterator[FileLine]:
    """The lines from an offset on, where line `number` begins; a line that is too long is skipped piece by piece."""
    while True:
        stream.seek(start)
        data = stream.readline(max_bytes + 1)
        if not data:
            return
        if is_too_long := len(data) > max_bytes:
            end, is_complete = _skip_line(stream, start + len(data), data)
            data = data[:_PIECE_BYTES]
        else:
            end, is_complete = start + len(data), data.endswith(b"\n")
        yield FileLine(number, start, end, data, is_complete, is_too_long)
        start, number = end, number + 1


def _skip_line(stream: BinaryIO, end: int, piece: bytes) -> tuple[int, bool]:
    """The end of the line that is being read, and whether it has a line end."""
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_PIECE_BYTES)
        end += len(piece)
    return end, bool(piece)


def parse_json_line(data: bytes | str) -> Any:
    """The JSON value of a line; raises ValueError, also for one that is nested too deep."""
    return loads(data, max_values=sys.maxsize)

"""Where each line of a growing file begins is read once and kept beside it, for as long as it is true.

`rollouts.jsonl.offsets` holds `mtrloff1`, how many bytes of the file it covers (64 bits), a sha256, and then where each
line begins (64 bits each), all little-endian. The sha256 is of these beginnings and the last line that is covered, so
that it fits no other file. The file can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from array import array
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from trainer.run.blobs import write_whole

HEAD = struct.Struct("<8sQ32s")
MAGIC = b"mtrloff1"
CHUNK = 1 << 20


def offsets(file: Path) -> array[int]:
    """The beginning of each whole line, and as the last item the end of the last one; a torn line is none."""
    kept = file.with_name(file.name + ".offsets")
    with file.open("rb") as text:
        found = _read(kept, text) or array("Q", [0])
        known = len(found)
        found.extend(_ends(text, found[-1]))
        if len(found) > known:
            with contextlib.suppress(OSError):  # A run that may only be read is read without.
                write_whole(kept, _written(found, text))
    return found


def _ends(text: BinaryIO, place: int) -> array[int]:
    """Where the lines from `place` on end."""
    ends = array("Q")
    text.seek(place)
    while chunk := text.read(CHUNK):
        at = -1
        while (at := chunk.find(b"\n", at + 1)) >= 0:
            ends.append(place + at + 1)
        place += len(chunk)
    return ends


def _read(kept: Path, text: BinaryIO) -> array[int] | None:
    """What is kept, if it is of this text."""
    try:
        data = kept.read_bytes()
    except OSError:
        return None
    if len(data) <= HEAD.size or (len(data) - HEAD.size) % 8:
        return None
    magic, covered, digest = HEAD.unpack_from(data)
    begins = data[HEAD.size :]
    found = _swapped(array("Q", begins))
    if magic != MAGIC or digest != _digest(begins, text, found[-1], covered):
        return None
    found.append(covered)
    return found


def _written(found: array[int], text: BinaryIO) -> bytes:
    begins = _swapped(found[:-1]).tobytes()
    return HEAD.pack(MAGIC, found[-1], _digest(begins, text, found[-2], found[-1])) + begins


def _digest(begins: bytes, text: BinaryIO, start: int, end: int) -> bytes:
    if not start < end <= os.fstat(text.fileno()).st_size:
        return b""
    text.seek(start)
    return sha256(begins + text.read(end - start)).digest()


def _swapped(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values

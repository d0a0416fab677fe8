"""Drops the colour profile of a PNG, for images of which nothing but the profile is damaged."""

from __future__ import annotations

import struct

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_CHUNKS = frozenset((b"iCCP", b"sRGB", b"gAMA", b"cHRM", b"cICP", b"mDCV", b"cLLI"))
_FRAME_BYTES = 12
"""Length, type and checksum around the data of a chunk."""


def drop_colour_profile(data: bytes) -> bytes | None:
    """The PNG without its chunks about colour, which stand before the pixels; None if it has none, or is no PNG."""
    if not data.startswith(_SIGNATURE):
        return None
    kept, offset, dropped = [_SIGNATURE], len(_SIGNATURE), False
    while offset + _FRAME_BYTES <= len(data):
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"IDAT":
            break
        end = offset + _FRAME_BYTES + length
        if kind in _COLOUR_CHUNKS:
            dropped = True
        else:
            kept.append(data[offset:end])
        offset = end
    return b"".join((*kept, data[offset:])) if dropped else None

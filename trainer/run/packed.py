"""Numbers of a kind stand in text as their bytes do: nothing is rounded, and nothing is written twice.

A packed array is `plain:` or `deflate:` (whichever is shorter) and then, in base64, its little-endian bytes as they
are or zlib-compressed. In Python an array of ids is read by
`struct.iter_unpack("<i", zlib.decompress(base64.b64decode(text.removeprefix("deflate:"))))`.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

WIDTH = {"i": 4, "d": 8}


def pack(values: Sequence[float], kind: str) -> str:
    """`kind` is `i` for 32-bit integers and `d` for doubles, which keep every bit."""
    data = struct.pack(f"<{len(values)}{kind}", *values)
    small = zlib.compress(data)
    name, kept = ("deflate", small) if len(small) < len(data) else ("plain", data)
    return f"{name}:{b64encode(kept).decode()}"


def unpack(text: str, kind: str) -> tuple[Any, ...]:
    name, _, kept = text.partition(":")
    if name not in ("plain", "deflate"):
        raise ValueError(f"an array is packed as plain or deflate, not as {name[:20]!r}")
    data = b64decode(kept, validate=True)
    if name == "deflate":
        data = zlib.decompress(data)
    return struct.unpack(f"<{len(data) // WIDTH[kind]}{kind}", data)

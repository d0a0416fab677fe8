"""Base64 and JSON of messages to sandboxes: large ones in a thread, piece by piece, so that the event loop goes on."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from gateway.bounded_json import loads
from gateway.large_json import is_large, run_beside
from gateway.wire import dumps_large

LARGE_BYTES = 65536
"""Longer values are encoded and parsed in a thread."""
PIECE_BYTES = 2**20
"""Longer files are sent and received in several messages."""
_ENCODED_AT_ONCE, _DECODED_AT_ONCE = 3 * 2**14, 2**16
"""Bytes of one step: each holds the interpreter. Multiples of 3 and of 4, between which base64 has no borders."""

GetPiece = Callable[[str, int, int], Awaitable[tuple[bytes, bool]]]
"""Reads a part of a file: its path, the most bytes of the whole file, and where to begin; tells whether it ends."""


async def encode_message(message: Any) -> bytes:
    """A message as JSON."""
    if not is_large(message, LARGE_BYTES):
        return json.dumps(message).encode()
    return await run_beside(lambda: dumps_large(message))


async def parse_message(body: bytes) -> Any:
    """The value of a JSON text, in which anything may be written; raises ValueError and RecursionError."""
    return json.loads(body) if len(body) <= LARGE_BYTES else await run_beside(loads, body)


async def encode_base64(data: bytes) -> str:
    """Base64 of bytes."""
    return _encode(data) if len(data) <= LARGE_BYTES else await run_beside(_encode, data)


async def decode_base64(text: Any) -> bytes:
    """The bytes of base64, in which anything may be written; raises ValueError and TypeError."""
    if not isinstance(text, str):
        raise TypeError("base64 is a text")
    return _decode(text) if len(text) <= LARGE_BYTES else await run_beside(_decode, text)


async def get_pieces(get_piece: GetPiece, path: str, max_bytes: int) -> bytes:
    """A file, read piece by piece."""
    pieces: list[bytes] = []
    length, is_end = 0, False
    while not is_end and length <= max_bytes:
        piece, is_end = await get_piece(path, max_bytes, length)
        pieces.append(piece)
        length += len(piece)
        is_end = is_end or not piece
    return b"".join(pieces) if length <= LARGE_BYTES else await run_beside(b"".join, pieces)


def split_pieces(data: bytes, *, append: bool) -> Iterator[tuple[bytes, bool]]:
    """The parts in which a file is sent, each with whether it follows what the file has. Empty files have one."""
    for start in range(0, len(data) or 1, PIECE_BYTES):
        yield data[start : start + PIECE_BYTES], append or start > 0


def _encode(data: bytes) -> str:
    starts = range(0, len(data), _ENCODED_AT_ONCE)
    return "".join(base64.b64encode(data[start : start + _ENCODED_AT_ONCE]).decode() for start in starts)


def _decode(text: str) -> bytes:
    starts = range(0, len(text), _DECODED_AT_ONCE)
    return b"".join(base64.b64decode(text[start : start + _DECODED_AT_ONCE], validate=True) for start in starts)

"""MCP content blocks: real media, and results that the protocol does not allow."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from typing import Any

Part = dict[str, Any]


def text(words: str) -> Part:
    return {"type": "text", "text": words}


def image(width: int, height: int) -> Part:
    return {"type": "image", "data": in_base64(png(width, height)), "mimeType": "image/png"}


def audio() -> Part:
    return {"type": "audio", "data": in_base64(wav()), "mimeType": "audio/wav"}


def text_resource() -> Part:
    resource = {"uri": "note://1", "mimeType": "text/plain", "text": "the text of a note"}
    return {"type": "resource", "resource": resource}


def link() -> Part:
    return {"type": "resource_link", "uri": "note://3", "name": "a note", "mimeType": "text/plain"}


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def png(width: int, height: int) -> bytes:
    """A black image of one bit per pixel, so that a very large one is still small on the wire."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" * (1 + (width + 7) // 8)) * height
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(b"\0\0" * 8)
    return file.getvalue()


BAD_RESULTS: dict[str, dict[str, Any]] = {
    "unknown_type": {"content": [text("known"), {"type": "hologram", "data": "?"}]},
    "invalid_base64": {"content": [text("known"), {"type": "image", "data": "*not base64*", "mimeType": "image/png"}]},
    "not_an_image": {"content": [{"type": "image", "data": in_base64(b"not a PNG"), "mimeType": "image/png"}]},
    "missing_field": {"content": [text("known"), {"type": "image", "mimeType": "image/png"}]},
    "missing": {},
    "string": {"content": "a bare string"},
    "null": {"content": None},
    "structured_list": {"content": [text("known")], "structuredContent": [1, 2]},
}
"""Results that the protocol does not allow, by fault."""

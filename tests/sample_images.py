"""Generated images for tests: valid ones, animations, decompression bombs and truncated files."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image as Pillow

SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'
COLORS = ("red", "green", "blue", "yellow", "black", "white")


def plain_image(width: int = 2, height: int = 3, color: str = "red") -> Pillow.Image:
    return Pillow.new("RGB", (width, height), color)


def png(width: int = 2, height: int = 3, color: str = "red") -> bytes:
    return encode(plain_image(width, height, color), "PNG")


def encode(picture: Pillow.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, format=form, **options)
    return out.getvalue()


def animation(form: str = "GIF", frames: int = 3, size: tuple[int, int] = (4, 4), duration_ms: int = 100) -> bytes:
    """An animation whose frames have different colors."""
    first, *rest = (plain_image(*size, COLORS[place % len(COLORS)]) for place in range(frames))
    lossless = {"lossless": True} if form == "WEBP" else {}
    return encode(first, form, save_all=True, append_images=rest, duration=duration_ms, **lossless)


def decompression_bomb(width: int = 31_623, height: int = 31_623) -> bytes:
    """A PNG that declares slightly more than 10^9 pixels and contains none."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", b"")]
    framed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def truncated_png() -> bytes:
    """A PNG with a valid header that ends in the middle of its pixels."""
    return encode(Pillow.effect_noise((64, 64), 50), "PNG")[:-500]


def decode(data: bytes) -> Pillow.Image:
    return Pillow.open(io.BytesIO(data))

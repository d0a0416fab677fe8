"""How large a picture is stands at its beginning, so that no bomb has to be opened to be known for one."""

from __future__ import annotations

import struct

from gateway.media.kind import MediaError, raster

MOST_SEGMENTS = 4096
"""Of a JPEG, before the one that tells its size."""
_NO_FRAME = (0xC4, 0xC8, 0xCC)
"""Markers among those of frames that begin none."""


def size(data: bytes) -> tuple[int, int]:
    """Width and height, as the header tells them; raises MediaError for what has no such header."""
    try:
        width, height = _READERS[raster(data)](data)
    except (struct.error, IndexError) as error:
        raise MediaError("not a readable picture: it ends within its header") from error
    if width < 1 or height < 1:
        raise MediaError(f"not a readable picture: it is {width}x{height}")
    return width, height


def ends(data: bytes) -> bool:
    """Whether the file has an end of its kind; one that was cut off has none. No pixel is looked at."""
    match raster(data):
        case "image/png":
            return b"IEND" in data[-1024:]
        case "image/jpeg":
            return data.rfind(b"\xff\xd9") > len(data) // 2  # Before, it may end a smaller picture within.
        case "image/gif":
            return data.rstrip(b"\0")[-1:] == b";"
        case "image/webp":
            return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return len(data) >= int.from_bytes(data[2:6], "little")


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise MediaError("not a readable picture: a PNG without its header")
    return _pair(">II", data, 16)


def _gif(data: bytes) -> tuple[int, int]:
    return _pair("<HH", data, 6)


def _bmp(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:  # the oldest form
        return _pair("<HH", data, 18)
    width, height = _pair("<ii", data, 18)
    return width, abs(height)  # negative where its rows go downwards


def _webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(_whole(data, at, 3), "little") + 1 for at in (24, 27))
            return width, height
        case b"VP8L":
            bits = struct.unpack_from("<I", data, 21)[0]
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = _pair("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    raise MediaError("not a readable picture: a WebP without its header")


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MOST_SEGMENTS):
        while data[at] == 0xFF and data[at + 1] == 0xFF:
            at += 1
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0xD9, 0xDA):
            break
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            height, width = _pair(">HH", data, at + 5)
            return width, height
        alone = marker == 0x01 or 0xD0 <= marker <= 0xD8
        at += 2 if alone else 2 + struct.unpack_from(">H", data, at + 2)[0]
    raise MediaError("not a readable picture: a JPEG that does not tell its size")


def _whole(data: bytes, at: int, count: int) -> bytes:
    if len(data) < at + count:
        raise IndexError
    return data[at : at + count]


def _pair(form: str, data: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(form, data, at)
    return first, second


_READERS = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/bmp": _bmp, "image/webp": _webp}

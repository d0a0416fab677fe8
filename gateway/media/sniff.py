"""Reads a medium's type and an image's size from its first bytes, without decoding it.

A declared MIME type counts only where the bytes tell nothing, and never for images. The size is known before any pixel
is decoded, so that a decompression bomb is refused unopened.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from urllib.parse import unquote_to_bytes

from gateway.types import Audio, Image, Video

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"ID3", "audio/mpeg"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"\x1aE\xdf\xa3", "video/webm"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {b"avif": "image/avif", b"avis": "image/avif", b"heic": "image/heic", b"mif1": "image/heic"}
RASTER_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""The supported image types."""
SVG = "image/svg+xml"
_SVG_START = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml|<!--|<!DOCTYPE svg|<svg)")
_SVG_SEARCH_BYTES = 1024
"""The `<svg>` element is searched in this many bytes."""
MAX_JPEG_SEGMENTS = 4096
"""JPEG segments that are read in search of the size."""
_NON_FRAME_MARKERS = (0xC4, 0xC8, 0xCC)
"""JPEG markers from 0xC0 to 0xCF that do not start a frame."""


class MediaError(ValueError):
    """A medium that cannot be used, with the reason."""


def sniff(data: bytes) -> str | None:
    """The MIME type according to the first bytes; None if they are of no known type."""
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]), "video/mp4")
    mime = next((mime for signature, mime in _SIGNATURES if data.startswith(signature)), None)
    if mime is None and _SVG_START.match(data) and b"<svg" in data[:_SVG_SEARCH_BYTES]:
        return SVG
    return mime


def raster_type(data: bytes) -> str:
    """The MIME type of an image; raises MediaError for other data and for unsupported image types."""
    mime = sniff(data)
    if mime in RASTER_TYPES:
        return mime
    supported = ", ".join(mime.removeprefix("image/") for mime in RASTER_TYPES)
    if mime == SVG:
        raise MediaError(f"SVG images are not supported; render it to one of {supported}")
    if mime is None:
        raise MediaError(f"{len(data)} bytes that are none of {supported}")
    raise MediaError(f"{mime} is none of {supported}")


def media_from_bytes(data: bytes, mime: str | None = None) -> Image | Audio | Video:
    """An image, audio or video part for the bytes; `mime` is used only for audio and video of unknown type."""
    detected = sniff(data) or mime or ""
    if detected.startswith("image/"):
        return Image(data, raster_type(data))
    for part_type, prefix in ((Audio, "audio/"), (Video, "video/")):
        if detected.startswith(prefix):
            return part_type(data, detected)
    raise MediaError(f"{len(data)} bytes of unknown type{f' (declared {mime})' if mime else ''}")


def as_video(data: bytes) -> Video:
    """An animated image file as a video part: `image/gif` becomes `video/gif`, since receivers see only the type."""
    return Video(data, f"video/{raster_type(data).removeprefix('image/')}")


def to_data_uri(part: Image | Audio | Video) -> str:
    """A part as a `data:` URI with base64 content."""
    return f"data:{part.mime};base64,{base64.b64encode(part.data).decode('ascii')}"


def media_from_data_uri(uri: str) -> Image | Audio | Video:
    """The part of a `data:` URI, base64 or percent-encoded."""
    head, _, body = uri.partition(",")
    mime = head.removeprefix("data:").split(";")[0] or "text/plain"
    return media_from_bytes(decode_base64(body) if head.endswith(";base64") else unquote_to_bytes(body), mime)


def decode_base64(text: str) -> bytes:
    """Decodes strict base64; raises MediaError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"not base64: {error}") from error


def read_image_size(data: bytes) -> tuple[int, int]:
    """Width and height from an image's header; raises MediaError where there is no valid one."""
    try:
        width, height = _SIZE_READERS[raster_type(data)](data)
    except (struct.error, IndexError) as error:
        raise MediaError("not a readable image: it ends within its header") from error
    if width < 1 or height < 1:
        raise MediaError(f"not a readable image: its size is {width}x{height}")
    return width, height


def has_end_marker(data: bytes) -> bool:
    """Whether an image file ends as its format demands; False for truncated files. Pixels are not decoded."""
    match raster_type(data):
        case "image/png":
            return b"IEND" in data[-1024:]
        case "image/jpeg":
            return data.rfind(b"\xff\xd9") > len(data) // 2  # An earlier one may end an embedded thumbnail.
        case "image/gif":
            return data.rstrip(b"\0")[-1:] == b";"
        case "image/webp":
            return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return len(data) >= int.from_bytes(data[2:6], "little")


def _read_png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise MediaError("not a readable image: a PNG without its header")
    return _unpack_pair(">II", data, 16)


def _read_bmp_size(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:  # the oldest header version
        return _unpack_pair("<HH", data, 18)
    width, height = _unpack_pair("<ii", data, 18)
    return width, abs(height)  # negative for rows stored from top to bottom


def _read_webp_size(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(_slice(data, offset, 3), "little") + 1 for offset in (24, 27))
            return width, height
        case b"VP8L":
            bits = struct.unpack_from("<I", data, 21)[0]
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = _unpack_pair("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    raise MediaError("not a readable image: a WebP without its header")


def _read_jpeg_size(data: bytes) -> tuple[int, int]:
    offset = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        while data[offset] == 0xFF and data[offset + 1] == 0xFF:
            offset += 1
        marker = data[offset + 1]
        if data[offset] != 0xFF or marker in (0xD9, 0xDA):
            break
        if 0xC0 <= marker <= 0xCF and marker not in _NON_FRAME_MARKERS:
            height, width = _unpack_pair(">HH", data, offset + 5)
            return width, height
        has_no_payload = marker == 0x01 or 0xD0 <= marker <= 0xD8
        offset += 2 if has_no_payload else 2 + struct.unpack_from(">H", data, offset + 2)[0]
    raise MediaError("not a readable image: a JPEG without a size in its header")


def _slice(data: bytes, offset: int, count: int) -> bytes:
    if len(data) < offset + count:
        raise IndexError
    return data[offset : offset + count]


def _unpack_pair(struct_format: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(struct_format, data, offset)
    return first, second


_SIZE_READERS = {
    "image/png": _read_png_size,
    "image/jpeg": _read_jpeg_size,
    "image/gif": lambda data: _unpack_pair("<HH", data, 6),
    "image/bmp": _read_bmp_size,
    "image/webp": _read_webp_size,
}

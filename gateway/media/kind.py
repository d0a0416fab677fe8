"""The first bytes tell the type; what somebody declared is believed only where they are silent, and of no picture."""

from __future__ import annotations

import base64
import binascii
import re
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
RASTERS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""The pictures that are taken in."""
SVG = "image/svg+xml"
_DRAWING = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml|<!--|<!DOCTYPE svg|<svg)")
_HEAD = 1024
"""Where a drawing's first element is looked for."""


class MediaError(ValueError):
    """A medium that cannot be taken in, with the reason."""


def sniff(data: bytes) -> str | None:
    """The type that the bytes themselves tell."""
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]), "video/mp4")
    found = next((mime for signature, mime in _SIGNATURES if data.startswith(signature)), None)
    if found is None and _DRAWING.match(data) and b"<svg" in data[:_HEAD]:
        return SVG
    return found


def of_bytes(data: bytes, mime: str | None = None) -> Image | Audio | Video:
    """A medium by its content; a declared type counts for sounds and films alone."""
    found = sniff(data) or mime or ""
    if found.startswith("image/"):
        return Image(data, raster(data))
    for kind, prefix in ((Audio, "audio/"), (Video, "video/")):
        if found.startswith(prefix):
            return kind(data, found)
    raise MediaError(f"{len(data)} bytes of unknown type{f' (declared {mime})' if mime else ''}")


def raster(data: bytes) -> str:
    """A picture's type. Raises MediaError for what is none, or none that can be taken in."""
    found = sniff(data)
    if found in RASTERS:
        return found
    known = ", ".join(mime.removeprefix("image/") for mime in RASTERS)
    if found == SVG:
        raise MediaError(f"SVG is a drawing in words, not a picture of pixels; render it to one of {known}")
    if found is None:
        raise MediaError(f"{len(data)} bytes that are none of {known}")
    raise MediaError(f"{found} is none of {known}")


def as_film(data: bytes) -> Video:
    """A picture that moves, as a film: the type says so, since across a border the type is all that tells."""
    return Video(data, f"video/{raster(data).removeprefix('image/')}")


def data_uri(part: Image | Audio | Video) -> str:
    return f"data:{part.mime};base64,{base64.b64encode(part.data).decode('ascii')}"


def of_data_uri(uri: str) -> Image | Audio | Video:
    head, _, body = uri.partition(",")
    mime = head.removeprefix("data:").split(";")[0] or "text/plain"
    return of_bytes(decoded(body) if head.endswith(";base64") else unquote_to_bytes(body), mime)


def decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"not base64: {error}") from error

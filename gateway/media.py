"""Whatever a tool returns becomes parts, in order; a picture is checked for type and size before anyone decodes it."""

from __future__ import annotations

import base64
import binascii
import io
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from PIL import Image as Pictures
from pydantic import BaseModel

from gateway.types import Audio, Image, Part, Resource, Text, Video

MAX_PIXELS = 64_000_000
"""A larger picture is refused: decoding it would cost a quarter of a gigabyte."""
MAX_BYTES = 32 * 1024 * 1024
"""A larger medium is refused."""

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"ID3", "audio/mpeg"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"\x1aE\xdf\xa3", "video/webm"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}


class MediaError(ValueError):
    """A medium that cannot be taken in, with the reason."""


def to_parts(value: Any) -> tuple[Part, ...]:
    """Parts of any value that a tool may return; structure without a medium in it is text, as JSON."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (Text(value),)
    if isinstance(value, Part):
        return (value,)
    if hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video")):
        return _of_response(value)
    if isinstance(value, bytes | bytearray | memoryview) or _is_picture(value):
        return (to_medium(value),)
    if isinstance(value, list | tuple) and any(_holds_part(item) for item in value):
        return tuple(part for item in value for part in to_parts(item))
    if isinstance(value, Mapping) and value.get("type") in _CHAT_PARTS:
        return (_of_chat_part(value),)
    return (Text(to_json(value)),)


def to_json(value: Any) -> str:
    """JSON as a policy reads it: its own alphabet, no escapes for what is printable."""
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """The same value in JSON's own kinds; what JSON has no word for becomes its text."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def to_medium(value: Any) -> Image | Audio | Video:
    """One medium from bytes, a path, a data URI, an array or a PIL picture."""
    if isinstance(value, Image | Audio | Video):
        return value
    if _is_picture(value):
        return _of_picture(value)
    if isinstance(value, str) and value.startswith("data:"):
        return of_bytes(*_of_data_uri(value))
    if isinstance(value, str | Path):
        return of_bytes(Path(value).expanduser().read_bytes())
    if isinstance(value, bytes | bytearray | memoryview):
        return of_bytes(bytes(value))
    raise MediaError(f"{type(value).__name__} is not a picture, a sound or a film")


def of_bytes(data: bytes, mime: str | None = None) -> Image | Audio | Video:
    """A medium by its content; a declared type is believed only where the content does not speak."""
    found = sniff(data) or mime or ""
    for kind, prefix in ((Image, "image/"), (Audio, "audio/"), (Video, "video/")):
        if found.startswith(prefix):
            return kind(data, found)
    raise MediaError(f"{len(data)} bytes of unknown type{f' (declared {mime})' if mime else ''}")


def sniff(data: bytes) -> str | None:
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[4:8] == b"ftyp":
        return "video/mp4"
    return next((mime for signature, mime in _SIGNATURES if data.startswith(signature)), None)


def size(image: Image) -> tuple[int, int]:
    """Width and height, read from the header alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pictures.DecompressionBombWarning)  # our own bound is the lower one
            with Pictures.open(io.BytesIO(image.data)) as picture:
                return picture.size
    except (OSError, ValueError, SyntaxError, Pictures.DecompressionBombError) as error:
        raise MediaError(f"not a readable picture: {error}") from error


def check(part: Part) -> str | None:
    """Why a part may not pass on, or None."""
    data = None if isinstance(part, Text) else part.data
    if isinstance(part, Text) or data is None:
        return None
    if len(data) > MAX_BYTES:
        return f"{len(data)} bytes, more than {MAX_BYTES}"
    if not isinstance(part, Image) and not (part.mime or "").startswith("image/"):
        return None
    try:
        width, height = size(Image(data))
    except MediaError as error:
        return str(error)
    return f"{width}x{height} pixels, more than {MAX_PIXELS}" if width * height > MAX_PIXELS else None


def admitted(parts: Iterable[Part]) -> tuple[tuple[Part, ...], int]:
    """The parts, with a note in the place of each that may not pass, and how many those were."""
    kept: list[Part] = []
    refused = 0
    for part in parts:
        reason = check(part)
        refused += reason is not None
        kept.append(part if reason is None else Text(f"[{type(part).__name__.lower()} left out: {reason}]"))
    return tuple(kept), refused


def data_uri(part: Image | Audio | Video) -> str:
    return f"data:{part.mime};base64,{base64.b64encode(part.data).decode('ascii')}"


def _holds_part(item: Any) -> bool:
    return (
        isinstance(item, Part | bytes | bytearray | memoryview)
        or _is_picture(item)
        or (isinstance(item, Mapping) and item.get("type") in _CHAT_PARTS)
    )


_CHAT_PARTS = ("text", "image_url", "input_audio", "image", "video")


def _of_chat_part(part: Mapping[str, Any]) -> Part:
    """A content part as chat messages write it."""
    match part:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            return to_medium(url) if url.startswith("data:") else Resource(url, "image/*")
        case {"type": "input_audio", "input_audio": {"data": str(data), **rest}}:
            return Audio(_decoded(data), f"audio/{rest.get('format', 'wav')}")
        case {"type": "image" | "video" as kind, **rest} if kind in rest and not _is_path(rest[kind]):
            return to_medium(rest[kind])
    return Text(to_json(part))


def _is_path(value: Any) -> bool:
    """A dict may hold what a stranger wrote, so a name in it never opens a file; only `ToolResponse` may."""
    return isinstance(value, str | Path) and not str(value).startswith("data:")


def _of_response(value: Any) -> tuple[Part, ...]:
    """verl's ToolResponse: pictures, films, then the text that speaks of them."""
    parts: list[Part] = [to_medium(item) for item in _many(getattr(value, "image", None))]
    parts += [_film(item) for item in _many(getattr(value, "video", None))]
    return (*parts, Text(value.text)) if value.text else tuple(parts)


def _many(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def _film(value: Any) -> Image | Audio | Video:
    """A film already in a file stays one; a list of frames becomes an animated picture file."""
    if not isinstance(value, list | tuple):
        return to_medium(value)
    frames = [_opened(frame) for frame in value]
    if not frames:
        raise MediaError("a film without frames")
    out = io.BytesIO()
    frames[0].save(out, format="WEBP", save_all=True, append_images=frames[1:], lossless=True)
    return Video(out.getvalue(), "video/webp")


def _opened(frame: Any) -> Pictures.Image:
    medium = to_medium(frame)
    return Pictures.open(io.BytesIO(medium.data)).convert("RGB")


def _is_picture(value: Any) -> bool:
    return isinstance(value, Pictures.Image) or hasattr(value, "__array_interface__")


def _of_picture(value: Any) -> Image:
    try:
        picture = value if isinstance(value, Pictures.Image) else Pictures.fromarray(value)
    except (TypeError, ValueError, KeyError) as error:
        raise MediaError(f"an array that is no picture: {error}") from error
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
        picture = picture.convert("RGB")
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return Image(out.getvalue(), "image/png")


def _of_data_uri(uri: str) -> tuple[bytes, str]:
    head, _, body = uri.partition(",")
    mime = head.removeprefix("data:").split(";")[0] or "text/plain"
    return (_decoded(body) if head.endswith(";base64") else unquote_to_bytes(body)), mime


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"not base64: {error}") from error

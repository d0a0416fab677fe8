"""Whatever a tool returns becomes parts, in order; what cannot be one leaves a note in its place.

A path opens a file only where a tool's own code gives it: in a `ToolResponse`, or to `process_image`. A path inside
plain data may be a stranger's word, and stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from gateway.media.kind import MediaError, as_film, decoded, of_bytes, of_data_uri
from gateway.media.picture import (
    Picture,
    encoded,
    encoded_film,
    frames_of_array,
    is_array,
    is_picture,
    of_value,
    opened,
)
from gateway.plain import to_json
from gateway.types import Audio, Image, Part, Resource, Text, Video

MOST_FILE_BYTES = 256 * 1024 * 1024
"""A larger file is not read."""
FPS = 2.0
"""Of a film that comes as frames."""


class Taken(NamedTuple):
    parts: tuple[Part, ...]
    lost: int
    """How many media could not be taken in; each has a note among the parts."""


def to_parts(value: Any) -> tuple[Part, ...]:
    """Parts of any value that a tool may return; structure without a medium in it is text, as JSON."""
    return take(value).parts


def take(value: Any) -> Taken:
    parts: list[Part] = []
    lost = 0
    for kind, make in _makers(value):
        try:
            parts.append(make())
        except MediaError as error:
            lost += 1
            parts.append(note(kind, str(error)))
    return Taken(tuple(parts), lost)


def note(kind: str, reason: str) -> Text:
    """What stands in the place of a part that is not shown."""
    return Text(f"[{kind} left out: {reason}]")


def is_heavy(value: Any) -> bool:
    """Whether making parts of it takes a picture to be encoded, or a file to be read: work for a thread."""
    if _is_response(value):
        return bool(getattr(value, "image", None) or getattr(value, "video", None))
    return is_picture(value) or (isinstance(value, list | tuple) and any(is_picture(item) for item in value))


Maker = tuple[str, Callable[[], Part]]
"""What a part is called if it cannot be made, and what makes it."""


def _makers(value: Any) -> Iterator[Maker]:
    if value is None:
        return
    if isinstance(value, str):
        yield "text", lambda: Text(value)
    elif isinstance(value, Part):
        yield "part", lambda: value
    elif _is_response(value):
        yield from _of_response(value)
    elif isinstance(value, bytes | bytearray | memoryview) or is_picture(value):
        yield "image", lambda: to_medium(value)
    elif isinstance(value, list | tuple) and any(_holds_part(item) for item in value):
        for item in value:
            yield from _makers(item)
    elif isinstance(value, Mapping) and value.get("type") in _CHAT_PARTS:
        yield str(value["type"]).removesuffix("_url"), lambda: _of_chat_part(value)
    else:
        yield "text", lambda: Text(to_json(value))


def to_medium(value: Any) -> Image | Audio | Video:
    """One medium from bytes, a path, a data URI, an array or a PIL picture."""
    if isinstance(value, Image | Audio | Video):
        return value
    if is_array(value) and len(getattr(value, "shape", ())) == 4:
        return encoded_film(frames_of_array(value), FPS)
    if is_picture(value):
        return encoded(of_value(value))
    if isinstance(value, str) and value.startswith("data:"):
        return of_data_uri(value)
    if isinstance(value, str | Path):
        return of_bytes(read(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return of_bytes(bytes(value))
    raise MediaError(f"{type(value).__name__} is not a picture, a sound or a film")


def read(path: str | Path) -> bytes:
    """A file that its own user names, by a path or a `file://` address."""
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        raise MediaError("an address is not fetched: download it, and give the bytes")
    if isinstance(path, str) and path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    file = Path(path).expanduser()
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:80]}..."
    try:
        if not file.is_file():
            raise MediaError(f"there is no file {shown!r}")
        if file.stat().st_size > MOST_FILE_BYTES:
            raise MediaError(f"{shown!r} has more than {MOST_FILE_BYTES} bytes")
        return file.read_bytes()
    except MediaError:
        raise
    except (OSError, ValueError) as error:
        raise MediaError(f"{shown!r} cannot be read: {error}") from error


def _holds_part(item: Any) -> bool:
    return (
        isinstance(item, Part | bytes | bytearray | memoryview)
        or is_picture(item)
        or (isinstance(item, Mapping) and item.get("type") in _CHAT_PARTS)
    )


_CHAT_PARTS = ("text", "image_url", "video_url", "input_audio", "image", "video")


def _of_chat_part(part: Mapping[str, Any]) -> Part:
    """A content part as chat messages write it."""
    match part:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image_url" | "video_url" as kind}:
            url = part.get(kind)
            url = url.get("url") if isinstance(url, Mapping) else url
            if isinstance(url, str):
                return of_data_uri(url) if url.startswith("data:") else Resource(url, f"{kind.removesuffix('_url')}/*")
        case {"type": "input_audio", "input_audio": {"data": str(data), **rest}}:
            return Audio(decoded(data), f"audio/{rest.get('format', 'wav')}")
        case {"type": "image", "image": shown} if not _is_path(shown):
            return to_medium(shown)
        case {"type": "video", "video": shown} if not _is_path(shown):
            return to_film(shown)
    return Text(to_json(part))


def _is_path(value: Any) -> bool:
    """A dict may hold what a stranger wrote, so a name in it never opens a file; only `ToolResponse` may."""
    if isinstance(value, list | tuple):
        return any(map(_is_path, value))
    return isinstance(value, str | Path) and not str(value).startswith("data:")


def _is_response(value: Any) -> bool:
    return hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video"))


def _of_response(value: Any) -> Iterator[Maker]:
    """verl's ToolResponse: pictures, films, then the text that speaks of them."""
    for item in _many(getattr(value, "image", None)):
        yield "image", lambda item=item: to_medium(item)  # type: ignore[misc]
    for item in _many(getattr(value, "video", None)):
        yield "video", lambda item=item: to_film(item)  # type: ignore[misc]
    if value.text:
        yield "text", lambda: Text(value.text)


def _many(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


def to_film(value: Any) -> Image | Audio | Video:
    """A film already in a file stays one; frames become an animated picture file."""
    if isinstance(value, list | tuple):
        return encoded_film([to_picture(frame) for frame in value], FPS)
    medium = to_medium(value)
    return as_film(medium.data) if isinstance(medium, Image) else medium


def to_picture(value: Any) -> Picture:
    """One picture, opened, from whatever may be one."""
    if is_picture(value):
        return of_value(value)
    medium = to_medium(value)
    if not isinstance(medium, Image):
        raise MediaError(f"{medium.mime} is no picture")
    return opened(medium.data)

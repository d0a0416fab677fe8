"""Whatever a tool returns becomes parts, in order; what cannot be one leaves a note in its place.

A path opens a file only where a tool's own code gives it: in a `ToolResponse`, or to `process_image`. A path inside
plain data may be a stranger's word, and stays text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from gateway.media.header import size
from gateway.media.kind import MediaError, as_film, decoded, of_bytes, of_data_uri, sniff
from gateway.media.picture import (
    Picture,
    encoded,
    encoded_film,
    frames_of_array,
    is_picture,
    of_value,
    opened,
    shows,
)
from gateway.plain import SCALARS, is_array, plain, raw, to_json
from gateway.types import Audio, Image, Json, Part, Resource, Text, Video

MOST_FILE_BYTES = 256 * 1024 * 1024
"""A larger file is not read."""
FPS = 2.0
"""Of a film that comes as frames."""


class Taken(NamedTuple):
    parts: tuple[Part, ...]
    lost: int
    """How many media could not be taken in; each has a note in its place."""
    told: Json = None
    """Of structure, what its JSON says."""


def to_parts(value: Any) -> tuple[Part, ...]:
    """Parts of any value that a tool may return; structure is text, as JSON, and the media in it follow."""
    return take(value).parts


def take(value: Any) -> Taken:
    taking = _Taking()
    taking.take(value)
    return Taken(tuple(taking.parts), taking.lost, taking.told)


def note(kind: str, reason: str) -> Text:
    """What stands in the place of a part that is not shown."""
    return Text(f"[{kind} left out: {reason}]")


def is_heavy(value: Any) -> bool:
    """Whether making parts of it takes a picture to be encoded, or a file to be read: work for a thread."""
    if _is_response(value):
        return bool(getattr(value, "image", None) or getattr(value, "video", None))
    return shows(value) or any(is_heavy(item) for item in _within(value) if type(item) not in SCALARS)


Made = TypeVar("Made")


class _Taking:
    """One value on its way to parts."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.lost = 0
        self.told: Json = None
        self._counts: Counter[str] = Counter()

    def take(self, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str):
            self._keep(_picture_in(value) or Text(value))
        elif isinstance(value, Part):
            self._keep(value)
        elif _is_response(value):
            self._response(value)
        elif raw(value) is not None or shows(value):
            self._keep(self._made("image", partial(to_medium, value)))
        elif isinstance(value, list | tuple) and any(map(_holds_part, value)):
            for item in value:
                self.take(item)
        elif _is_chat_part(value):
            part = self._made(value["type"].removesuffix("_url"), partial(_of_chat_part, value))
            self._structure(value) if part is None else self._keep(part)
        else:
            self._structure(value)

    def _response(self, value: Any) -> None:
        """verl's ToolResponse: pictures, films, then the text that speaks of them."""
        for item in _many(getattr(value, "image", None)):
            self._keep(self._made("image", partial(to_medium, item)))
        for item in _many(getattr(value, "video", None)):
            self._keep(self._made("video", partial(to_film, item)))
        if value.text:
            self._keep(Text(value.text))

    def _structure(self, value: Any) -> None:
        place = len(self.parts)
        self.told = plain(self._named(value))
        self.parts.insert(place, Text(to_json(self.told)))

    def _named(self, value: Any) -> Any:
        """The same with a name in the place of each medium, at any depth; the media are kept in their order."""
        if isinstance(value, str) and (picture := _picture_in(value)) is not None:
            return self._keep(picture)
        if type(value) in SCALARS:
            return value
        if isinstance(value, Mapping):
            return {key: self._named(item) for key, item in value.items()}
        if isinstance(value, _MANY):
            return [self._named(item) for item in value]
        if isinstance(value, Image | Audio | Video | Resource):
            return self._keep(value)
        if shows(value) or sniff(raw(value) or b""):
            part = self._made("image", partial(to_medium, value))
            return part.text if isinstance(part, Text) else self._keep(part)
        return self._named(_by_name(value)) if _is_record(value) else value

    def _made(self, kind: str, make: Callable[[], Made]) -> Made | Text:
        try:
            return make()
        except MediaError as error:
            self.lost += 1
            return note(kind, str(error))

    def _keep(self, part: Part) -> str:
        """The part's name among those of the value."""
        kind = type(part).__name__.lower()
        self._counts[kind] += 1
        self.parts.append(part)
        return f"[{kind} {self._counts[kind]}]"


_MANY = (list, tuple, set, frozenset)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _by_name(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _MANY):
        return value
    return _by_name(value).values() if _is_record(value) else ()


def _picture_in(text: str) -> Image | None:
    """What a data URI shows; all other text is text."""
    if not text.startswith("data:image/"):
        return None
    try:
        medium = of_data_uri(text)
        size(medium.data)
    except MediaError:
        return None
    return medium if isinstance(medium, Image) else None


def to_medium(value: Any) -> Image | Audio | Video:
    """One medium from bytes, a path, a data URI, an array or a PIL picture."""
    if isinstance(value, Image | Audio | Video):
        return value
    if not isinstance(value, Picture) and is_array(value) and len(getattr(value, "shape", ())) == 4:
        return encoded_film(frames_of_array(value), FPS)
    if is_picture(value):
        return encoded(of_value(value))
    if isinstance(value, str) and value.startswith("data:"):
        return of_data_uri(value)
    if isinstance(value, str | Path):
        return of_bytes(read(value))
    if (held := raw(value)) is not None:
        return of_bytes(held)
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
    if isinstance(item, str):
        return _picture_in(item) is not None
    return isinstance(item, Part) or raw(item) is not None or shows(item) or _is_chat_part(item)


_CHAT_PARTS = ("text", "image_url", "video_url", "input_audio", "image", "video")


def _is_chat_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _CHAT_PARTS


def _of_chat_part(part: Mapping[str, Any]) -> Part | None:
    """A content part as chat messages write it; None where it is written in another way."""
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
    return None


def _is_path(value: Any) -> bool:
    """A dict may hold what a stranger wrote, so a name in it never opens a file; only `ToolResponse` may."""
    if isinstance(value, list | tuple):
        return any(map(_is_path, value))
    return isinstance(value, str | Path) and not str(value).startswith("data:")


def _is_response(value: Any) -> bool:
    return hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video"))


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

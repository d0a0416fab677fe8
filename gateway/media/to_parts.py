"""Converts any value that a tool returns into parts: text, images, audio, video, resources.

What cannot be converted is replaced by a note. A path opens a file only where a tool's own code names it, in a
`ToolResponse` or for `process_image`; a path inside plain data may come from anybody and stays text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from gateway.media.image import (
    PILImage,
    encode_png,
    encode_video,
    frames_from_array,
    is_pil_or_array,
    looks_like_image,
    open_image,
    to_pil_image,
)
from gateway.media.sniff import (
    MediaError,
    as_video,
    decode_base64,
    media_from_bytes,
    media_from_data_uri,
    read_image_size,
    sniff,
)
from gateway.policy_text import repeatable_note
from gateway.types import Audio, Image, Json, Part, Resource, Text, Video
from gateway.wire import SCALARS, is_array, raw_bytes, sorted_set, to_json, to_plain

MAX_FILE_BYTES = 256 * 1024 * 1024
"""A larger file is not read."""
DEFAULT_FPS = 2.0
"""Frames per second of a video that a tool returns as frames."""


class Conversion(NamedTuple):
    """A tool's return value as parts."""

    parts: tuple[Part, ...]
    refused: int
    """Media that could not be converted; each is replaced by a note."""
    structured: Json = None
    """The JSON value of structured data, with placeholders for the media in it."""


def to_parts(value: Any) -> tuple[Part, ...]:
    """The parts of a tool's return value; structured data becomes JSON text, followed by the media in it."""
    return convert_value(value).parts


def convert_value(value: Any) -> Conversion:
    """Converts a tool's return value."""
    converter = _Converter()
    converter.add(value)
    return Conversion(tuple(converter.parts), converter.refused, converter.structured)


def refusal_note(kind: str, reason: str) -> Text:
    """The text that replaces a part which the policy is not shown."""
    return Text(f"[{kind} left out: {repeatable_note(reason)}]")


def is_heavy(value: Any) -> bool:
    """Whether converting a value encodes images or reads files, so that it should be done in a thread."""
    if _is_tool_response(value):
        return bool(getattr(value, "image", None) or getattr(value, "video", None))
    return looks_like_image(value) or any(is_heavy(item) for item in _children(value) if type(item) not in SCALARS)


T = TypeVar("T")


class _Converter:
    """Collects the parts of one value."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.refused = 0
        self.structured: Json = None
        self._counts: Counter[str] = Counter()

    def add(self, value: Any) -> None:
        if value is None:
            return
        if isinstance(value, str):
            self._append(_image_from_text(value) or Text(value))
        elif isinstance(value, Part):
            self._append(value)
        elif _is_tool_response(value):
            self._add_tool_response(value)
        elif raw_bytes(value) is not None or looks_like_image(value):
            self._append(self._try_convert("image", partial(to_media, value)))
        elif isinstance(value, list | tuple) and any(map(_is_convertible, value)):
            for item in value:
                self.add(item)
        elif _is_chat_part(value):
            part = self._try_convert(value["type"].removesuffix("_url"), partial(_convert_chat_part, value))
            self._add_structure(value) if part is None else self._append(part)
        else:
            self._add_structure(value)

    def _add_tool_response(self, response: Any) -> None:
        """Adds a ToolResponse in verl's order: images, videos, then the text about them."""
        for item in _as_list(getattr(response, "image", None)):
            self._append(self._try_convert("image", partial(to_media, item)))
        for item in _as_list(getattr(response, "video", None)):
            self._append(self._try_convert("video", partial(to_video, item)))
        if response.text:
            self._append(Text(response.text))

    def _add_structure(self, value: Any) -> None:
        index = len(self.parts)
        self.structured = to_plain(self._replace_media(value))
        self.parts.insert(index, Text(to_json(self.structured)))

    def _replace_media(self, value: Any) -> Any:
        """Replaces each medium in nested data by a placeholder such as `[image 1]`, and adds it to the parts."""
        if isinstance(value, str) and (image := _image_from_text(value)) is not None:
            return self._append(image)
        if type(value) in SCALARS:
            return value
        if isinstance(value, Mapping):
            return {key: self._replace_media(item) for key, item in value.items()}
        if isinstance(value, set | frozenset):
            value = sorted_set(value)
        if isinstance(value, list | tuple):
            return [self._replace_media(item) for item in value]
        if isinstance(value, Image | Audio | Video | Resource):
            return self._append(value)
        if looks_like_image(value) or sniff(raw_bytes(value) or b""):
            part = self._try_convert("image", partial(to_media, value))
            return part.text if isinstance(part, Text) else self._append(part)
        return self._replace_media(_field_values(value)) if _is_dataclass_instance(value) else value

    def _try_convert(self, kind: str, convert: Callable[[], T]) -> T | Text:
        try:
            return convert()
        except MediaError as error:
            self.refused += 1
            return refusal_note(kind, str(error))

    def _append(self, part: Part) -> str:
        """Adds a part and returns its placeholder."""
        kind = type(part).__name__.lower()
        self._counts[kind] += 1
        self.parts.append(part)
        return f"[{kind} {self._counts[kind]}]"


_COLLECTIONS = (list, tuple, set, frozenset)


def _is_dataclass_instance(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _field_values(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _COLLECTIONS):
        return value
    return _field_values(value).values() if _is_dataclass_instance(value) else ()


def _image_from_text(text: str) -> Image | None:
    """The image of a `data:image/` URI with a valid header; None for all other text."""
    if not text.startswith("data:image/"):
        return None
    try:
        medium = media_from_data_uri(text)
        read_image_size(medium.data)
    except MediaError:
        return None
    return medium if isinstance(medium, Image) else None


def to_media(value: Any) -> Image | Audio | Video:
    """One image, audio or video part from bytes, a path, a data URI, an array or a PIL image; raises MediaError."""
    if isinstance(value, Image | Audio | Video):
        return value
    if not isinstance(value, PILImage) and is_array(value) and len(getattr(value, "shape", ())) == 4:
        return encode_video(frames_from_array(value), DEFAULT_FPS)
    if is_pil_or_array(value):
        return encode_png(to_pil_image(value))
    if isinstance(value, str) and value.startswith("data:"):
        return media_from_data_uri(value)
    if isinstance(value, str | Path):
        return media_from_bytes(read_media_file(value))
    if (data := raw_bytes(value)) is not None:
        return media_from_bytes(data)
    raise MediaError(f"{type(value).__name__} is not an image, audio or video")


def to_video(value: Any) -> Image | Audio | Video:
    """One video part; a list of frames is encoded as an animated WebP."""
    if isinstance(value, list | tuple):
        return encode_video([load_image(frame) for frame in value], DEFAULT_FPS)
    medium = to_media(value)
    return as_video(medium.data) if isinstance(medium, Image) else medium


def load_image(value: Any) -> PILImage:
    """Opens one image from anything that `to_media` takes; raises MediaError."""
    if is_pil_or_array(value):
        return to_pil_image(value)
    medium = to_media(value)
    if not isinstance(medium, Image):
        raise MediaError(f"{medium.mime} is not an image")
    return open_image(medium.data)


def read_media_file(path: str | Path) -> bytes:
    """Reads a file named by a path or a `file://` URL; raises MediaError."""
    if isinstance(path, str) and path.startswith(("http://", "https://")):
        raise MediaError("URLs are not downloaded: download the file, and give its bytes or its path")
    if isinstance(path, str) and path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    file = Path(path).expanduser()
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:80]}..."
    try:
        if not file.is_file():
            raise MediaError(f"there is no file {name!r}")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise MediaError(f"{name!r} has more than {MAX_FILE_BYTES} bytes")
        return file.read_bytes()
    except MediaError:
        raise
    except (OSError, ValueError) as error:
        raise MediaError(f"{name!r} cannot be read: {error}") from error


def _is_convertible(item: Any) -> bool:
    """Whether a list with this item is a list of parts, rather than data."""
    if isinstance(item, str):
        return _image_from_text(item) is not None
    return isinstance(item, Part) or raw_bytes(item) is not None or looks_like_image(item) or _is_chat_part(item)


_CHAT_PART_TYPES = ("text", "image_url", "video_url", "input_audio", "image", "video")


def _is_chat_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _CHAT_PART_TYPES


def _convert_chat_part(part: Mapping[str, Any]) -> Part | None:
    """The part for a content part of a chat message; None if its fields do not fit its type."""
    match part:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image_url" | "video_url" as kind}:
            url = part.get(kind)
            url = url.get("url") if isinstance(url, Mapping) else url
            if isinstance(url, str):
                if url.startswith("data:"):
                    return media_from_data_uri(url)
                return Resource(url, f"{kind.removesuffix('_url')}/*")
        case {"type": "input_audio", "input_audio": {"data": str(data), **rest}}:
            return Audio(decode_base64(data), f"audio/{rest.get('format', 'wav')}")
        case {"type": "image", "image": image} if not _is_path(image):
            return to_media(image)
        case {"type": "video", "video": video} if not _is_path(video):
            return to_video(video)
    return None


def _is_path(value: Any) -> bool:
    """Whether a value names a file. Data may come from anybody, so a path in a dict is never opened."""
    if isinstance(value, list | tuple):
        return any(map(_is_path, value))
    return isinstance(value, str | Path) and not str(value).startswith("data:")


def _is_tool_response(value: Any) -> bool:
    return hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video"))


def _as_list(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)

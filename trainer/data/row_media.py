"""Puts a row's images and videos into its prompt, at `<image>` and `<video>`, and converts rows to plain values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from gateway.media import MediaError, media_from_bytes
from gateway.media.image import PILImage, decode_image, encode_png, measure_image
from gateway.media.process import process_image, process_video
from gateway.media.sniff import has_end_marker, media_from_data_uri
from gateway.media.to_parts import read_media_file
from gateway.media.video import FrameSampling, sample_video
from gateway.plural import format_count
from gateway.types import Image
from trainer.rollout.settings import ColumnSettings

Row = Mapping[str, Any]
PLAIN_TYPES = frozenset({str, int, float, bool, bytes, type(None)})
ID_DIGITS = 16
"""Hex digits of an id that is made from a row: 64 bits, so that a million rows do not collide."""


def to_plain(value: Any, *, sparse: bool = False) -> Any:
    """Converts values of libraries to those of JSON, and bytes. `sparse` drops null values, with which tables fill
    missing keys."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, sparse=sparse) for key, item in value.items() if not (sparse and item is None)}
    if isinstance(value, list | tuple):
        return [to_plain(item, sparse=sparse) for item in value]
    for unwrap in ("tolist", "as_py"):  # scalars and arrays of NumPy, and of Arrow
        if hasattr(value, unwrap):
            return to_plain(getattr(value, unwrap)(), sparse=sparse)
    return value


def row_id(row: Row) -> str:
    """An id made from the row's content, the same in every format. Raises UnicodeError for text with half a surrogate
    pair, and MediaError for an unreadable image."""
    text = json.dumps(to_plain(row, sparse=True), sort_keys=True, ensure_ascii=False, default=_digest_value)
    return sha256(text.encode()).hexdigest()[:ID_DIGITS]


def _digest_value(value: Any) -> str:
    """Digests an image by its pixels: its repr has a memory address."""
    value = decode_image(value) if isinstance(value, PILImage) else value
    data = value.tobytes() if hasattr(value, "tobytes") else value
    return sha256(data).hexdigest() if isinstance(data, bytes) else str(value)


KINDS = ("image", "video")
MEDIA_KEYS = ("bytes", "image", "image_url", "video", "video_url", "url", "path", "base64")
"""Keys of a mapping that may hold its medium; the first that is present counts."""
SIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
VIDEO_FRAMES = 8
"""A video is shown as this many frames, evenly spaced, unless its row says otherwise."""
VIDEO_SIZE_KEYS = (*SIZE_KEYS, "total_pixels")
SAMPLING_KEYS = ("nframes", "fps", "min_frames", "max_frames")
Part = Mapping[str, Any]
ReportProblem = Callable[[str, str, str], None]
"""Called with a field, the problem and the remedy."""


class RowMedia:
    """Loads the media of one source's rows, and puts them into prompts."""

    def __init__(self, columns: ColumnSettings, folder: Path) -> None:
        self.columns, self.folder = columns, folder
        self._keys = {"image": columns.image_key, "video": columns.video_key}

    def insert_media(self, chat: list[dict[str, Any]], row: Row, report: ReportProblem) -> list[dict[str, Any]]:
        """The chat with all media in their places; problems are reported with their field."""
        values = {kind: _to_list(row.get(key)) for kind, key in self._keys.items()}
        likely_columns = {kind: self._guess_column(kind, chat, row) for kind in KINDS if values[kind] is None}
        inserter = _MediaInserter(self, values, likely_columns, report)
        filled = [inserter.fill_message(index, message) for index, message in enumerate(chat)]
        unplaced = [part for kind in KINDS for part in inserter.unplaced(kind)]
        first = next((message for message in filled if message.get("role") == "user"), None)
        if unplaced and first is not None:
            content = first.get("content")
            first["content"] = unplaced + (content if isinstance(content, list) else [_text_part(content)])
        return filled

    def key(self, kind: str) -> str:
        """The column of this kind of media."""
        return self._keys[kind]

    def load_parts(self, kind: str, value: Any) -> list[dict[str, Any]]:
        """Loads an image, or the frames of a video, as message parts. Raises MediaError."""
        images = [self._load_image(value)] if kind == "image" else self._load_frames(value)
        return [{"type": "image", "image": image} for image in images]

    def make_id(self, row: Row) -> str:
        """An id made from the row's content, for a row without one. Raises as `row_id` does."""
        return row_id(row)

    def _guess_column(self, kind: str, chat: Sequence[Part], row: Row) -> str | None:
        """A column of another name that may hold the media, if the prompt has a place for them."""
        if not any(f"<{kind}>" in text for text in _texts(chat)):
            return None
        columns = (column for column, value in row.items() if value and (column == kind or self._holds(kind, value)))
        return next(columns, None)

    def _holds(self, kind: str, value: Any) -> bool:
        if kind != "image" or not isinstance(value, PILImage | bytes | Mapping | list):
            return False
        try:
            return bool(self._load_image(value[0] if isinstance(value, list) else value))
        except (MediaError, TypeError, ValueError):
            return False

    def _load_image(self, value: Any) -> Image:
        content = _unwrap_media(value)
        medium = encode_png(content) if isinstance(content, PILImage) else media_from_bytes(self._read_bytes(content))
        if not isinstance(medium, Image):
            raise MediaError(f"{medium.mime} is not an image")
        measure_image(medium.data)
        if not has_end_marker(medium.data):
            raise MediaError(f"an image of {medium.mime} that is truncated")
        size = _select_options(value, SIZE_KEYS)
        return encode_png(process_image({**size, "image": medium.data})) if size else medium

    def _load_frames(self, value: Any) -> list[Image]:
        content, size = _unwrap_media(value), _select_options(value, VIDEO_SIZE_KEYS)
        if isinstance(content, list | tuple):
            images = [self._load_image(frame) for frame in content]
            return _resize_frames([image.data for image in images], size) if size else images
        frames = sample_video(self._read_bytes(content), self._frame_sampling(value)).images
        return _resize_frames(frames, size) if size else [encode_png(frame) for frame in frames]

    def _frame_sampling(self, value: Any) -> FrameSampling:
        options = _select_options(value, SAMPLING_KEYS)
        return FrameSampling(
            fps=float(options.get("fps", FrameSampling().fps)),
            min_frames=int(options.get("min_frames", 1)),
            max_frames=int(options.get("max_frames", FrameSampling().max_frames)),
            frame_count=int(options.get("nframes", VIDEO_FRAMES)) if "fps" not in options else None,
        )

    def _read_bytes(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str | Path):
            raise MediaError(f"{type(value).__name__} is neither a path nor bytes nor a data URI")
        if isinstance(value, str) and value.startswith("data:"):
            return media_from_data_uri(value).data
        is_url = isinstance(value, str) and "://" in value
        return read_media_file(value if is_url else self.folder / Path(value).expanduser())


class UnloadedMedia(RowMedia):
    """Puts empty parts in the places of media, none of which is read or decoded."""

    def load_parts(self, kind: str, value: Any) -> list[dict[str, Any]]:
        return [{"type": kind, kind: ""}]

    def make_id(self, row: Row) -> str:
        return ""

    def _holds(self, kind: str, value: Any) -> bool:
        return False


class _MediaInserter:
    """Fills one row's chat, and counts the media that were used."""

    def __init__(
        self,
        media: RowMedia,
        values: Mapping[str, list[Any] | None],
        likely_columns: Mapping[str, str | None],
        report: ReportProblem,
    ) -> None:
        self._media, self._values, self._likely_columns, self._report = media, values, likely_columns, report
        self._used = dict.fromkeys(KINDS, 0)
        marks = "|".join(kind for kind in KINDS if values[kind] is not None or likely_columns[kind])
        self._marks = re.compile(f"<({marks})>") if marks else None
        """Placeholders count only if the row has such media; otherwise they are plain text."""

    def fill_message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            parts = list(self._split_text(content))
            return {**message, "content": parts} if len(parts) > 1 or _has_media(parts) else message
        if not isinstance(content, list):
            return message
        field = f"messages[{index}]"
        return {**message, "content": [new for part in content for new in self._fill_part(field, part)]}

    def unplaced(self, kind: str) -> list[dict[str, Any]]:
        """All media, if the prompt has no placeholder. If it has some, their number must be right."""
        values, used = self._values[kind] or [], self._used[kind]
        if used == 0:
            return [part for _ in values for part in self._load_next(kind)]
        if used < len(values):
            problem = f"has {len(values)}, but the prompt has {format_count(used, 'placeholder')}"
            self._report(self._media.key(kind), problem, f"write <{kind}> where each of them belongs")
        return []

    def _split_text(self, text: str) -> Iterator[dict[str, Any]]:
        if self._marks is None:
            yield _text_part(text)
            return
        for index, piece in enumerate(self._marks.split(text)):
            if index % 2:
                yield from self._load_next(piece)
            elif piece:
                yield _text_part(piece)

    def _fill_part(self, field: str, part: Any) -> Sequence[Any]:
        if not isinstance(part, Mapping):
            return [part]  # Reported where messages are read.
        kind = str(part.get("type")).removesuffix("_url")
        if kind == "text" and isinstance(part.get("text"), str):
            return list(self._split_text(part["text"]))
        if kind not in KINDS:
            return [part]
        if not any(part.get(key) is not None for key in MEDIA_KEYS):
            return self._load_next(kind)
        return self._load(f"{field}.{kind}", kind, part)

    def _load_next(self, kind: str) -> list[dict[str, Any]]:
        values, index = self._values[kind] or [], self._used[kind]
        self._used[kind] += 1
        field = f"{self._media.key(kind)}[{index}]"
        if index >= len(values):
            column = self._likely_columns.get(kind)
            add = f"add it, or remove a <{kind}>"
            remedy = f"did you mean `columns: {{{kind}_key: {column}}}`?" if column else add
            self._report(field, "is missing, but the prompt has a placeholder for it", remedy)
            return []
        return self._load(field, kind, values[index])

    def _load(self, field: str, kind: str, value: Any) -> list[dict[str, Any]]:
        try:
            return self._media.load_parts(kind, value)
        except (MediaError, TypeError, ValueError) as error:
            problem = str(error) if isinstance(error, MediaError) else f"has an invalid size or number: {error}"
            self._report(field, problem, "name a file relative to the data, or put its bytes into the row")
            return []


def _to_list(value: Any) -> list[Any] | None:
    return value if value is None or isinstance(value, list) else [value]


def _unwrap_media(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    medium = next((value[key] for key in MEDIA_KEYS if value.get(key) is not None), None)
    if isinstance(medium, Mapping):
        return _unwrap_media(medium)
    return f"data:;base64,{medium}" if medium is not None and medium is value.get("base64") else medium


def _texts(chat: Sequence[Part]) -> Iterator[str]:
    for message in chat:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        yield from (f"<{part.get('type')}>{part.get('text')}" for part in parts if isinstance(part, Mapping))


def _select_options(value: Any, keys: Sequence[str]) -> dict[str, Any]:
    """The options that a mapping has next to its medium."""
    return {key: value[key] for key in keys if value.get(key)} if isinstance(value, Mapping) else {}


def _resize_frames(frames: Sequence[Any], size: Mapping[str, Any]) -> list[Image]:
    """Resizes frames, without the one that may be added to make their number even."""
    return [encode_png(frame) for frame in process_video({**size, "video": list(frames)})[: len(frames)]]


def _has_media(parts: Sequence[Part]) -> bool:
    return any(part["type"] != "text" for part in parts)


def _text_part(content: Any) -> dict[str, Any]:
    return {"type": "text", "text": content or ""}

"""Where a row's prompt has a place for a picture, the picture stands: found beside the row, known by its bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.media import MediaError, of_bytes
from gateway.media.film import Sampling, frames
from gateway.media.header import ends
from gateway.media.kind import of_data_uri
from gateway.media.picture import Picture, encoded, measured
from gateway.media.process import process_image, process_video
from gateway.media.take import read
from gateway.types import Image
from trainer.config import Columns
from trainer.data.plain import Row

KINDS = ("image", "video")
HELD = ("bytes", "image", "image_url", "video", "video_url", "url", "path", "base64")
"""Where a mapping may have its picture; the first that is there counts."""
SIZED = ("min_pixels", "max_pixels", "resized_height", "resized_width")
OF_FILM = (*SIZED, "total_pixels")
COUNTED = ("nframes", "fps", "min_frames", "max_frames")
PART = Mapping[str, Any]
Wrong = Callable[[str, str, str], None]
"""Takes a field, the problem and the remedy."""


class Shown:
    """The pictures of one source of rows."""

    def __init__(self, columns: Columns, folder: Path) -> None:
        self.columns, self.folder = columns, folder
        self._keys = {"image": columns.image_key, "video": columns.video_key}

    def fill(self, chat: list[dict[str, Any]], row: Row, wrong: Wrong) -> list[dict[str, Any]]:
        """The chat with every picture in its place; what is amiss is told, each with its field."""
        given = {kind: _listed(row.get(key)) for kind, key in self._keys.items()}
        meant = {kind: self._meant(kind, chat, row) for kind in KINDS if given[kind] is None}
        filling = _Filling(self, given, meant, wrong)
        filled = [filling.message(place, message) for place, message in enumerate(chat)]
        before = [part for kind in KINDS for part in filling.unplaced(kind)]
        first = next((message for message in filled if message.get("role") == "user"), None)
        if before and first is not None:
            content = first.get("content")
            first["content"] = before + (content if isinstance(content, list) else [_text(content)])
        return filled

    def key(self, kind: str) -> str:
        return self._keys[kind]

    def parts(self, kind: str, value: Any) -> list[dict[str, Any]]:
        """Raises MediaError. A film is several pictures."""
        images = [self._image(value)] if kind == "image" else self._film(value)
        return [{"type": "image", "image": image} for image in images]

    def _meant(self, kind: str, chat: Sequence[PART], row: Row) -> str | None:
        """A column of another name, where the prompt has a place for what it holds."""
        if not any(f"<{kind}>" in words for words in _words(chat)):
            return None
        held = (column for column, value in row.items() if value and (column == kind or self._holds(kind, value)))
        return next(held, None)

    def _holds(self, kind: str, value: Any) -> bool:
        if kind != "image" or not isinstance(value, Picture | bytes | Mapping | list):
            return False
        try:
            return bool(self._image(value[0] if isinstance(value, list) else value))
        except (MediaError, TypeError, ValueError):
            return False

    def _image(self, value: Any) -> Image:
        held = _held(value)
        medium = encoded(held) if isinstance(held, Picture) else of_bytes(self._bytes(held))
        if not isinstance(medium, Image):
            raise MediaError(f"{medium.mime} is no picture")
        measured(medium.data)
        if not ends(medium.data):
            raise MediaError(f"a picture of {medium.mime} that is cut off at its end")
        sized = _asked(value, SIZED)
        return encoded(process_image({**sized, "image": medium.data})) if sized else medium

    def _film(self, value: Any) -> list[Image]:
        held, sized = _held(value), _asked(value, OF_FILM)
        if isinstance(held, list | tuple):
            images = [self._image(frame) for frame in held]
            return _fitted([image.data for image in images], sized) if sized else images
        pictures = frames(self._bytes(held), self._sampling(value)).pictures
        return _fitted(pictures, sized) if sized else [encoded(picture) for picture in pictures]

    def _sampling(self, value: Any) -> Sampling:
        asked = _asked(value, COUNTED)
        return Sampling(
            fps=float(asked.get("fps", Sampling().fps)),
            min_frames=int(asked.get("min_frames", 1)),
            max_frames=int(asked.get("max_frames", Sampling().max_frames)),
            frames=int(asked.get("nframes", self.columns.video_frames)) if "fps" not in asked else None,
        )

    def _bytes(self, held: Any) -> bytes:
        if isinstance(held, bytes):
            return held
        if not isinstance(held, str | Path):
            raise MediaError(f"{type(held).__name__} is neither a path nor bytes nor a data URI")
        if isinstance(held, str) and held.startswith("data:"):
            return of_data_uri(held).data
        addressed = isinstance(held, str) and "://" in held
        return read(held if addressed else self.folder / Path(held).expanduser())


class _Filling:
    """One row's chat, and what of its columns has found a place."""

    def __init__(
        self, shown: Shown, given: Mapping[str, list[Any] | None], meant: Mapping[str, str | None], wrong: Wrong
    ) -> None:
        self._shown, self._given, self._meant, self._wrong = shown, given, meant, wrong
        self._taken = dict.fromkeys(KINDS, 0)
        marks = "|".join(kind for kind in KINDS if given[kind] is not None or meant[kind])
        self._marks = re.compile(f"<({marks})>") if marks else None
        """Only where the row has such a column, if by another name; elsewhere the word is a word."""

    def message(self, place: int, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            parts = list(self._split(content))
            return {**message, "content": parts} if len(parts) > 1 or _shows(parts) else message
        if not isinstance(content, list):
            return message
        return {**message, "content": [one for part in content for one in self._part(f"messages[{place}]", part)]}

    def unplaced(self, kind: str) -> list[dict[str, Any]]:
        """Pictures of a prompt without any place. Where there are some, their number must be right."""
        values, taken = self._given[kind] or [], self._taken[kind]
        if taken == 0:
            return [part for _ in values for part in self._next(kind)]
        if taken < len(values):
            problem = f"has {len(values)}, and the prompt has places for {taken}"
            self._wrong(self._shown.key(kind), problem, f"write <{kind}> where each of them stands")
        return []

    def _split(self, text: str) -> Iterator[dict[str, Any]]:
        if self._marks is None:
            yield _text(text)
            return
        for place, piece in enumerate(self._marks.split(text)):
            if place % 2:
                yield from self._next(piece)
            elif piece:
                yield _text(piece)

    def _part(self, field: str, part: Any) -> Sequence[Any]:
        if not isinstance(part, Mapping):
            return [part]  # It is told of where messages are read.
        kind = str(part.get("type")).removesuffix("_url")
        if kind == "text" and isinstance(part.get("text"), str):
            return list(self._split(part["text"]))
        if kind not in KINDS:
            return [part]
        if not any(part.get(key) is not None for key in HELD):
            return self._next(kind)
        return self._made(f"{field}.{kind}", kind, part)

    def _next(self, kind: str) -> list[dict[str, Any]]:
        values, place = self._given[kind] or [], self._taken[kind]
        self._taken[kind] += 1
        field = f"{self._shown.key(kind)}[{place}]"
        if place >= len(values):
            meant = self._meant.get(kind)
            remedy = f"did you mean `columns: {{{kind}_key: {meant}}}`?" if meant else f"add it, or take a <{kind}> out"
            self._wrong(field, "is missing, and the prompt has a place for it", remedy)
            return []
        return self._made(field, kind, values[place])

    def _made(self, field: str, kind: str, value: Any) -> list[dict[str, Any]]:
        try:
            return self._shown.parts(kind, value)
        except (MediaError, TypeError, ValueError) as error:
            told = str(error) if isinstance(error, MediaError) else f"a size or number of it is amiss: {error}"
            self._wrong(field, told, "name a file beside the data, or hold its bytes in the row")
            return []


def _listed(value: Any) -> list[Any] | None:
    return value if value is None or isinstance(value, list) else [value]


def _held(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    held = next((value[key] for key in HELD if value.get(key) is not None), None)
    if isinstance(held, Mapping):
        return _held(held)
    return f"data:;base64,{held}" if held is not None and held is value.get("base64") else held


def _words(chat: Sequence[PART]) -> Iterator[str]:
    for message in chat:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        yield from (f"<{part.get('type')}>{part.get('text')}" for part in parts if isinstance(part, Mapping))


def _asked(value: Any, keys: Sequence[str]) -> dict[str, Any]:
    """What a mapping says beside its picture."""
    return {key: value[key] for key in keys if value.get(key)} if isinstance(value, Mapping) else {}


def _fitted(chosen: Sequence[Any], sized: Mapping[str, Any]) -> list[Image]:
    """Without the frame that would make them pairs."""
    return [encoded(frame) for frame in process_video({**sized, "video": list(chosen)})[: len(chosen)]]


def _shows(parts: Sequence[PART]) -> bool:
    return any(part["type"] != "text" for part in parts)


def _text(content: Any) -> dict[str, Any]:
    return {"type": "text", "text": content or ""}

"""Before a template sees a message, its media are taken out: what stands for each is a word or a place, never bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.media import MediaError, to_parts
from gateway.media.film import SHOWN, Sampling, frames
from gateway.media.picture import encoded
from gateway.types import Audio, Image, Part, Text, Video
from trainer.ledger import Medium, Message
from trainer.vision.eyes import Eyes, SightError
from trainer.vision.family import Layout

from .errors import TemplateError

Blind = Literal["note", "error"]
KINDS = frozenset({"image", "image_url", "video", "video_url", "input_audio"})
"""Of parts of a message that are no text."""
FILM = Sampling(min_frames=1, max_frames=SHOWN)
"""What is looked at of a film; tools and rows that want something else answer with its frames."""


@dataclass(frozen=True, slots=True)
class Laid:
    """Messages as a template takes them, and what was taken out of them."""

    messages: tuple[Message, ...]
    media: tuple[Medium, ...] = ()
    widths: tuple[int, ...] = ()
    """Of each medium, the ids that it takes; 0 where the model does not see it."""

    def parts(self, given: Sequence[Part]) -> tuple[Part, ...]:
        """What was answered, with the media as they are shown."""
        known = [part for part in given if isinstance(part, Image | Audio | Video)]
        if [one.data for one in known] == [one.data for one in self.media]:
            return tuple(given)
        return (*(part for part in given if part not in known), *self.media)

    def spans(self, ids: Sequence[int], image: int) -> tuple[tuple[int, int], ...]:
        """Where each medium stands among the ids that the template made."""
        at = [place for place, token in enumerate(ids) if token == image]
        wanted = sum(width > 0 for width in self.widths)
        if len(at) != wanted:
            raise TemplateError(
                f"the chat template gives {wanted} images {len(at)} places",
                "set `template.images` to in_tool_message or user_message, whichever it can do",
            )
        places = iter(at)
        seen, last = [], 0
        for width in self.widths:
            start = next(places) if width else last
            last = start + bool(width)
            seen.append((start, last))
        return tuple(seen)


def holds_media(messages: Sequence[Message]) -> bool:
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(_is_medium(part) for content in contents for part in content)


@dataclass
class _Laying:
    eyes: Eyes | None
    blind: Blind
    media: list[Medium] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def parts(self, part: Any) -> Iterator[dict[str, Any]]:
        """Of one message, as the template takes them; a film is several pictures."""
        if not _is_medium(part):
            yield dict(part)
            return
        found = to_parts(part)[0]
        if isinstance(found, Image) and part["type"].startswith(
            "video"
        ):  # An animation's bytes are those of a picture.
            found = Video(found.data, found.mime)
        if isinstance(found, Video) and self.eyes is not None:
            try:
                yield from [self._medium(encoded(frame)) for frame in frames(found.data, FILM).pictures]
            except MediaError as error:
                self.media.append(found)
                self.widths.append(0)
                yield _note("video", str(error))
        elif isinstance(found, Image | Audio | Video):
            yield self._medium(found)
        else:
            told = found.text if isinstance(found, Text) else "[image left out: its bytes are not here]"
            yield {"type": "text", "text": told}

    def _medium(self, found: Medium) -> dict[str, Any]:
        self.media.append(found)
        self.widths.append(0)
        kind = type(found).__name__.lower()
        if not isinstance(found, Image) or self.eyes is None:
            if self.blind == "error":
                raise TemplateError(
                    f"the model cannot take in {kind}s", "take one that does, or `template.blind: note`"
                )
            return _note(
                kind, "this model reads text alone" if self.eyes is None else f"this model takes in no {kind}s"
            )
        try:
            self.widths[-1] = self.eyes.look(found).width
        except SightError as error:
            return _note(kind, str(error))
        return {"type": "image"}


def lay(messages: Sequence[Message], eyes: Eyes | None, layout: Layout, blind: Blind) -> Laid:
    """Decodes what it was not shown before, so that it belongs into a thread where `holds_media`."""
    laying = _Laying(eyes, blind)
    rows = [_row(message, laying.parts) for message in messages]
    if layout == "user_message":
        rows = list(_behind(rows))
    return Laid(tuple(map(_joined, rows)), tuple(laying.media), tuple(laying.widths))


def _is_medium(part: Any) -> bool:
    """Not one that was taken out before: that is a place alone."""
    return isinstance(part, Mapping) and part.get("type") in KINDS and set(part) != {"type"}


def _row(message: Message, parts: Callable[[Any], Iterable[dict[str, Any]]]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [part for one in content for part in parts(one)]}


def _behind(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Media of tools' messages stand in one of a user, behind all of them: nothing may come between those."""
    shown: list[dict[str, Any]] = []
    for row in rows:
        if row["role"] != "tool" and shown:
            yield {"role": "user", "content": shown}
            shown = []
        if row["role"] == "tool" and isinstance(row["content"], list):
            told = [_pointed(part) for part in row["content"]]
            shown += [part for part in row["content"] if part["type"] == "image"]
            row = {**row, "content": told}
        yield row
    if shown:
        yield {"role": "user", "content": shown}


def _pointed(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": "[image: see the next message]"} if part["type"] == "image" else part


def _joined(row: dict[str, Any]) -> dict[str, Any]:
    """Text alone is a string, as every template takes it."""
    content = row.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**row, "content": "\n".join(str(part["text"]) for part in content)}
    return row


def _note(kind: str, why: str) -> dict[str, Any]:
    return {"type": "text", "text": f"[{kind} left out: {why}]"}

"""Prepares media in messages for a chat template: replaces images by placeholders, and other media by notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.media import MediaError, to_parts
from gateway.media.image import encode_png
from gateway.media.video import DEFAULT_SHOWN_FRAMES, FrameSampling, sample_video
from gateway.types import Audio, Image, Part, Text, Video
from trainer.ledger import Medium, Message
from trainer.template.errors import TemplateError
from trainer.vision.family import ImageLayout
from trainer.vision.image_processor import ImageProcessor, VisionError

MEDIA_PART_TYPES = frozenset({"image", "image_url", "video", "video_url", "input_audio"})
VIDEO_SAMPLING = FrameSampling(min_frames=1, max_frames=DEFAULT_SHOWN_FRAMES)
"""How videos in messages are sampled; tools and rows that need something else pass frames."""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Messages as a template takes them, and the media that were removed from them."""

    messages: tuple[Message, ...]
    media: tuple[Medium, ...] = ()
    widths: tuple[int, ...] = ()
    """The token count of each medium; 0 if the model does not see it."""

    def replace_media(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """An answer's parts with their media as shown, such as the frames of a video."""
        media = [part for part in parts if isinstance(part, Image | Audio | Video)]
        if [medium.data for medium in media] == [medium.data for medium in self.media]:
            return tuple(parts)
        return (*(part for part in parts if part not in media), *self.media)

    def find_spans(self, ids: Sequence[int], image_id: int) -> tuple[tuple[int, int], ...]:
        """The span of each medium's placeholder in the rendered ids."""
        placeholders = [index for index, token in enumerate(ids) if token == image_id]
        expected = sum(width > 0 for width in self.widths)
        if len(placeholders) != expected:
            raise TemplateError(
                f"the chat template writes {len(placeholders)} placeholders for {expected} images",
                "name a template of the model's family with `template.chat_template`",
            )
        starts = iter(placeholders)
        spans, stop = [], 0
        for width in self.widths:
            start = next(starts) if width else stop
            stop = start + bool(width)
            spans.append((start, stop))
        return tuple(spans)


def has_media(messages: Sequence[Message]) -> bool:
    """Whether any message contains media that were not replaced yet."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return any(_is_medium(part) for content in contents for part in content)


@dataclass
class _MediaCollector:
    """Removes media from messages, and collects them."""

    image_processor: ImageProcessor | None
    media: list[Medium] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def replace_in(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return dict(message)
        return {**message, "content": [replaced for part in content for replaced in self._replace(part)]}

    def _replace(self, part: Any) -> Iterator[dict[str, Any]]:
        """What the template takes instead of a part; a video becomes several images."""
        if not _is_medium(part):
            yield dict(part)
            return
        medium = to_parts(part)[0]
        if isinstance(medium, Image) and part["type"].startswith("video"):  # An animation is an image by its bytes.
            medium = Video(medium.data, medium.mime)
        if isinstance(medium, Video) and self.image_processor is not None:
            try:
                frames = [encode_png(frame) for frame in sample_video(medium.data, VIDEO_SAMPLING).images]
                yield from [self._collect(frame) for frame in frames]
            except MediaError as error:
                self.media.append(medium)
                self.widths.append(0)
                yield _note("video", str(error))
        elif isinstance(medium, Image | Audio | Video):
            yield self._collect(medium)
        else:
            text = medium.text if isinstance(medium, Text) else "[image left out: its bytes are not here]"
            yield {"type": "text", "text": text}

    def _collect(self, medium: Medium) -> dict[str, Any]:
        self.media.append(medium)
        self.widths.append(0)
        kind = type(medium).__name__.lower()
        if self.image_processor is None or not isinstance(medium, Image):
            is_text_model = self.image_processor is None
            return _note(kind, "this model reads text alone" if is_text_model else f"this model takes in no {kind}s")
        try:
            self.widths[-1] = self.image_processor.prepare(medium).token_count
        except VisionError as error:
            return _note(kind, str(error))
        return {"type": "image"}


def prepare_media(
    messages: Sequence[Message], image_processor: ImageProcessor | None, layout: ImageLayout
) -> MediaLayout:
    """Replaces media in messages. Decodes new images, so it should run in a thread if `has_media`."""
    collector = _MediaCollector(image_processor)
    replaced = [collector.replace_in(message) for message in messages]
    if layout == "user_message":
        replaced = list(_move_to_user_message(replaced))
    return MediaLayout(tuple(map(join_text, replaced)), tuple(collector.media), tuple(collector.widths))


def _is_medium(part: Any) -> bool:
    """Whether the part is a medium; a placeholder has a type only."""
    return isinstance(part, Mapping) and part.get("type") in MEDIA_PART_TYPES and set(part) != {"type"}


_SEE_NEXT = {"type": "text", "text": "[image: see the next message]"}


def _move_to_user_message(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Moves images of consecutive tool messages into a user message after them."""
    images: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" and images:
            yield {"role": "user", "content": images}
            images = []
        if message["role"] == "tool" and isinstance(message["content"], list):
            content = message["content"]
            images += [part for part in content if part["type"] == "image"]
            message = {**message, "content": [_SEE_NEXT if part["type"] == "image" else part for part in content]}
        yield message
    if images:
        yield {"role": "user", "content": images}


def join_text(message: Message) -> Message:
    """Content of text parts alone becomes a string, which every template supports."""
    content = message.get("content")
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return {**message, "content": "\n".join(str(part["text"]) for part in content)}
    return message


def _note(kind: str, reason: str) -> dict[str, Any]:
    return {"type": "text", "text": f"[{kind} left out: {reason}]"}

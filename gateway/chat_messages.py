"""Converts tool results to chat messages: one `role: tool` message for each call, in the order of the calls.

OpenAI's typed chat API accepts only text in tool messages. The strict layout therefore leaves a note in place of
media, and shows the media in one user message after all tool messages, which must not be interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from gateway.media import to_data_uri
from gateway.types import Audio, Image, Part, Resource, Text, ToolCall, ToolResult, are_text
from gateway.wire import to_base64

Content = str | list[dict[str, Any]]
Message = dict[str, Any]

_TEXT_OF = attrgetter("text")
_AUDIO_FORMATS = {"audio/mpeg": "mp3", "audio/x-wav": "wav", "audio/wave": "wav"}


def tool_messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """The default layout: text and media in the tool messages."""
    return [_tool_message(call, chat_content(result.parts)) for call, result in zip(calls, results, strict=True)]


def strict_tool_messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """The strict layout: text in tool messages, media in one user message after them."""
    messages: list[Message] = []
    user_content: list[dict[str, Any]] = []
    for call, result in zip(calls, results, strict=True):
        parts = [_chat_part(part) for part in result.parts]
        messages.append(_tool_message(call, "\n".join(_part_as_text(part, call) for part in parts)))
        media = [part for part in parts if part["type"] in _USER_MESSAGE_MEDIA]
        if media:
            user_content += [{"type": "text", "text": f"From tool call {call.id}:"}, *media]
    return [*messages, {"role": "user", "content": user_content}] if user_content else messages


def chat_content(parts: Sequence[Part]) -> Content:
    """A string for text alone, which every chat template accepts; otherwise a list of content parts."""
    if are_text(parts):
        return "\n".join(map(_TEXT_OF, parts))
    return [_chat_part(part) for part in parts]


def _tool_message(call: ToolCall, content: Content) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


_USER_MESSAGE_MEDIA = {"image_url": "image", "input_audio": "audio"}


def _part_as_text(part: dict[str, Any], call: ToolCall) -> str:
    kind = part["type"]
    if kind == "text":
        return str(part["text"])
    if kind in _USER_MESSAGE_MEDIA:
        return f"[{_USER_MESSAGE_MEDIA[kind]}: see the message after the tool messages, under tool call {call.id}]"
    return "[video: omitted, because this layout cannot contain one]"


def _chat_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Resource):
        return _resource_part(part)
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": to_data_uri(part)}}
    if isinstance(part, Audio):
        audio_format = _AUDIO_FORMATS.get(part.mime, part.mime.removeprefix("audio/"))
        return {"type": "input_audio", "input_audio": {"data": to_base64(part.data), "format": audio_format}}
    return {"type": "video_url", "video_url": {"url": to_data_uri(part)}}


def _resource_part(part: Resource) -> dict[str, Any]:
    if part.data is not None and (part.mime or "").startswith("image/"):
        return _chat_part(Image(part.data, part.mime or ""))
    if part.text is not None:
        return {"type": "text", "text": f"{part.uri}:\n{part.text}"}
    about = ", ".join(word for word in (part.name, part.description, part.mime) if word)
    size = f" ({len(part.data)} bytes)" if part.data is not None else ""
    return {"type": "text", "text": f"[resource {part.uri}{size}{': ' + about if about else ''}]"}

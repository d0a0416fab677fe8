"""Results as chat messages: one `role: tool` message for each call, in the order of the calls.

The typed chat API takes only text from a tool. Its strict layout therefore names what is missing where it stood,
and shows it in a user message behind all tool messages, since nothing may stand between those.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from gateway.media import data_uri
from gateway.types import Audio, Image, Part, Resource, Text, ToolCall, ToolResult

Content = str | list[dict[str, Any]]
Message = dict[str, Any]

_AUDIO_FORMATS = {"audio/mpeg": "mp3", "audio/x-wav": "wav", "audio/wave": "wav"}


def messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    return [_tool(call, content(result.parts)) for call, result in zip(calls, results, strict=True)]


def strict_messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """The layout of the typed API: text in tool messages, media in one user message after them."""
    said: list[Message] = []
    shown: list[dict[str, Any]] = []
    for call, result in zip(calls, results, strict=True):
        chat = [_chat(part) for part in result.parts]
        said.append(_tool(call, "\n".join(_in_words(part, call) for part in chat)))
        media = [part for part in chat if part["type"] in _SHOWN]
        if media:
            shown += [{"type": "text", "text": f"From tool call {call.id}:"}, *media]
    return [*said, {"role": "user", "content": shown}] if shown else said


def content(parts: Sequence[Part]) -> Content:
    """Text alone is a string, as every chat template reads it; with other parts it is a list in their order."""
    if all(isinstance(part, Text) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, Text))
    return [_chat(part) for part in parts]


def _tool(call: ToolCall, said: Content) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": said}


_SHOWN = {"image_url": "image", "input_audio": "audio"}


def _in_words(part: dict[str, Any], call: ToolCall) -> str:
    kind = part["type"]
    if kind == "text":
        return str(part["text"])
    if kind in _SHOWN:
        return f"[{_SHOWN[kind]}: see the message after the tool messages, under tool call {call.id}]"
    return "[video: left out, since this layout has no place for one]"


def _chat(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Resource):
        return _resource(part)
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": data_uri(part)}}
    if isinstance(part, Audio):
        return {"type": "input_audio", "input_audio": {"data": _base64(part.data), "format": _audio_format(part.mime)}}
    return {"type": "video_url", "video_url": {"url": data_uri(part)}}


def _resource(part: Resource) -> dict[str, Any]:
    if part.data is not None and (part.mime or "").startswith("image/"):
        return _chat(Image(part.data, part.mime or ""))
    if part.text is not None:
        return {"type": "text", "text": f"{part.uri}:\n{part.text}"}
    about = ", ".join(word for word in (part.name, part.description, part.mime) if word)
    size = f" ({len(part.data)} bytes)" if part.data is not None else ""
    return {"type": "text", "text": f"[resource {part.uri}{size}{': ' + about if about else ''}]"}


def _audio_format(mime: str) -> str:
    return _AUDIO_FORMATS.get(mime, mime.removeprefix("audio/"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

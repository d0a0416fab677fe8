"""Everything that crosses a process border has one JSON form, which loses nothing and is read back as it was.

What a chat model reads is another matter: see `content.py`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gateway.plain import plain
from gateway.strict import strict as strictly
from gateway.types import (
    Audio,
    Feedback,
    Hints,
    Image,
    Json,
    Outcome,
    Part,
    Resource,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Video,
)

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_MEDIA: Mapping[str, type[Image | Audio | Video]] = {"image": Image, "audio": Audio, "video": Video}
_KINDS = {kind: name for name, kind in _MEDIA.items()}


class WireError(ValueError):
    """The other side wrote something that is not of this form."""


def dumps(value: Json) -> bytes:
    """JSON for the wire. A tool's own numbers and objects may have no JSON; they become null and text."""
    try:
        return _encode(value).encode()
    except (TypeError, ValueError):
        return _encode(_finite(plain(value))).encode()


def _finite(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def part_json(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Resource):
        given = {field.name: getattr(part, field.name) for field in fields(part)}
        if part.data is not None:
            given["data"] = _base64(part.data)
        return {"type": "resource"} | {name: value for name, value in given.items() if value is not None}
    return {"type": _KINDS[type(part)], "data": _base64(part.data), "mime": part.mime}


def part_of(value: Mapping[str, Any]) -> Part:
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image" | "audio" | "video" as kind, "data": str(data), "mime": str(mime)}:
            return _MEDIA[kind](_bytes(data), mime)
        case {"type": "resource", "uri": str(), **rest}:
            data = rest.pop("data", None)
            return Resource(value["uri"], **rest, data=None if data is None else _bytes(data))
    raise WireError(f"no part has the form {str(value)[:80]!r}")


def result_json(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    """What a machine wants to know of a result; its parts are added where they are asked for."""
    return {
        "tool_call_id": call.id,
        "name": call.name,
        "outcome": result.outcome.value,
        "reward": result.reward,
        "done": result.done,
        "elapsed_s": result.elapsed_s,
        "attempts": result.attempts,
        "structured": result.structured,
        "metrics": dict(result.metrics),
        "reason": result.reason,
        "timing": dict(result.timing),
        "meta": dict(result.meta),
    }


def result_of(value: Mapping[str, Any]) -> ToolResult:
    given = {name: item for name, item in value.items() if name not in ("tool_call_id", "name")}
    given["parts"] = tuple(part_of(part) for part in value.get("parts", ()))
    given["outcome"] = Outcome(value["outcome"])
    return ToolResult(**given)


def feedback_json(heard: Feedback) -> dict[str, Any]:
    return {
        "done": heard.done,
        "message": heard.message,
        "score": heard.score,
        "metadata": dict(heard.metadata),
        "outcome": heard.outcome.value,
        "reason": heard.reason,
    }


def feedback_of(value: Mapping[str, Any]) -> Feedback:
    given = {name: item for name, item in value.items() if name != "message"}
    given["parts"] = tuple(part_of(part) for part in value.get("parts", ()))
    given["outcome"] = Outcome(value["outcome"])
    return Feedback(**given)


def spec_json(spec: ToolSpec) -> dict[str, Any]:
    given = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return given | {"hints": {field.name: getattr(spec.hints, field.name) for field in fields(Hints)}}


def spec_of(value: Mapping[str, Any]) -> ToolSpec:
    return ToolSpec(**{**value, "hints": Hints(**value["hints"])})


def tool_json(spec: ToolSpec, *, strict: bool = False) -> dict[str, Any]:
    """The spec as a chat API takes it; where strict rules cannot say the same, the schema stays and says so."""
    function: dict[str, Any] = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    if strict:
        closed = strictly(spec.parameters)
        function |= {"strict": False} if closed is None else {"strict": True, "parameters": closed}
    return {"type": "function", "function": function}


def task_json(task: Task) -> dict[str, Any]:
    """A task without what it leaves to the other side."""
    given = {
        "id": task.id or None,
        "tools": None if task.tools is None else list(task.tools),
        "create": {name: dict(kwargs) for name, kwargs in task.create.items()} or None,
        "feedback": task.feedback,
        "feedback_args": dict(task.feedback_args) or None,
        "ttl_s": task.ttl_s,
    }
    return {name: value for name, value in given.items() if value is not None}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"not base64: {error}") from error

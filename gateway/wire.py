"""JSON encoding of parts, results, feedback, specs and tasks, for HTTP and tapes; lossless in both directions.

`to_plain` converts any value that a tool returns to JSON types. For what a chat model reads, see `chat_messages.py`.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json as encode_json

from gateway.large_json import LARGE, TEXT_ENCODER, is_large, write_json
from gateway.policy_text import repeatable
from gateway.schema import strict_schema
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

SCALARS = (str, int, float, bool, type(None))
"""The most common types, checked first."""


def to_plain(value: Any) -> Any:
    """The value in JSON types; objects without a JSON equivalent become text."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [to_plain(item) for item in sorted_set(value)]
    if hasattr(value, "tolist") and is_array(value):
        return to_plain(value.tolist())
    if isinstance(value, str | int | float):
        return value
    data = raw_bytes(value)
    return repeatable(str(value)) if data is None else str(data)


def sorted_set(values: Iterable[Any]) -> list[Any]:
    """The items of a set in an order that is the same in every process."""
    return sorted(values, key=lambda value: json.dumps(to_plain(value), sort_keys=True))


def to_json(value: Any) -> str:
    """JSON text for a policy, without escapes for printable characters."""
    return write_json(TEXT_ENCODER, to_plain(value))


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array or scalar, or a tensor, without importing their libraries."""
    return hasattr(value, "__array_interface__") or (hasattr(value, "detach") and hasattr(value, "numpy"))


def raw_bytes(value: Any) -> bytes | None:
    """The bytes of a bytes-like object; None for other values."""
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

_MEDIA: Mapping[str, type[Image | Audio | Video]] = {"image": Image, "audio": Audio, "video": Video}
_MEDIA_NAMES = {kind: name for name, kind in _MEDIA.items()}


def dumps(value: Json) -> bytes:
    """Encodes JSON in ASCII; non-finite numbers become null. Of other types it writes some in forms of its own, so
    values of tools go through `to_plain` before."""
    try:
        return encode_json(value, ensure_ascii=True, inf_nan_mode="null")
    except ValueError:  # an object, or half a character (`\\ud83d`), which only the standard library writes
        return dumps_large(value)


def dumps_large(value: Json) -> bytes:
    """The same for a value of any size, in a thread: holds the interpreter for no long time."""
    try:
        return write_json(_ENCODER, value).encode()
    except (TypeError, ValueError):
        return write_json(_ENCODER, _nonfinite_to_null(to_plain(value))).encode()


def _nonfinite_to_null(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _nonfinite_to_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nonfinite_to_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_FIELDS = {
    ToolResult: attrgetter("structured", "metrics", "reason", "timing", "meta"),
    Feedback: attrgetter("metadata", "reason"),
}
"""What may be large beside the parts."""


def is_large_answer(answer: ToolResult | Feedback) -> bool:
    """Whether encoding a result or a feedback takes long."""
    values: list[Any] = list(filter(None, _FIELDS[type(answer)](answer)))
    if not values and len(answer.parts) == 1 and isinstance(answer.parts[0], Text):  # as most have
        return len(answer.parts[0].text) > LARGE
    parts = [part.text if isinstance(part, Text) else (getattr(part, "text", None), part.data) for part in answer.parts]
    return is_large(values + parts)


def to_base64(data: bytes) -> str:
    """Base64 of bytes, as text."""
    return base64.b64encode(data).decode("ascii")


_from_base64 = partial(base64.b64decode, validate=True)


def part_to_json(part: Part, encode: Callable[[bytes], str] = to_base64) -> dict[str, Any]:
    """Encodes a part; media as base64, or as what else `encode` makes of them."""
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Resource):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        if part.data is not None:
            values["data"] = encode(part.data)
        return {"type": "resource"} | {name: value for name, value in values.items() if value is not None}
    return {"type": _MEDIA_NAMES[type(part)], "data": encode(part.data), "mime": part.mime}


def part_from_json(value: Mapping[str, Any], decode: Callable[[str], bytes] = _from_base64) -> Part:
    """Decodes a part; raises ValueError if it is invalid."""
    match value:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image" | "audio" | "video" as kind, "data": str(data), "mime": str(mime)}:
            return _MEDIA[kind](decode(data), mime)
        case {"type": "resource", "uri": str(), **rest}:
            data = rest.pop("data", None)
            if not all(isinstance(text, str | None) for text in rest.values()):
                raise ValueError(f"not a valid resource: {str(value)[:80]!r}")
            return Resource(value["uri"], **rest, data=None if data is None else decode(data))
    raise ValueError(f"not a valid part: {str(value)[:80]!r}")


def result_to_json(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    """The fields of a result without its parts, which are added where they are needed."""
    return {
        "tool_call_id": call.id,
        "name": call.name,
        "outcome": str(result.outcome),  # An enum's `value` takes two calls.
        "reward": result.reward,
        "done": result.done,
        "elapsed_s": result.elapsed_s,
        "attempts": result.attempts,
        "structured": to_plain(result.structured),
        "metrics": to_plain(result.metrics) if result.metrics else {},
        "reason": result.reason,
        "timing": dict(result.timing),
        "meta": to_plain(result.meta) if result.meta else {},
    }


def result_from_json(value: Mapping[str, Any]) -> ToolResult:
    """Decodes a result."""
    kwargs = {name: item for name, item in value.items() if name not in ("tool_call_id", "name")}
    kwargs["parts"] = tuple(part_from_json(part) for part in value.get("parts", ()))
    kwargs["outcome"] = Outcome(value["outcome"])
    return ToolResult(**kwargs)


def feedback_to_json(feedback: Feedback) -> dict[str, Any]:
    """Encodes feedback without its parts."""
    return {
        "done": feedback.done,
        "message": feedback.message,
        "score": feedback.score,
        "metadata": to_plain(feedback.metadata),
        "outcome": feedback.outcome.value,
        "reason": feedback.reason,
    }


def feedback_from_json(value: Mapping[str, Any]) -> Feedback:
    """Decodes feedback."""
    kwargs = {name: item for name, item in value.items() if name != "message"}
    kwargs["parts"] = tuple(part_from_json(part) for part in value.get("parts", ()))
    kwargs["outcome"] = Outcome(value["outcome"])
    return Feedback(**kwargs)


def spec_to_json(spec: ToolSpec) -> dict[str, Any]:
    """Encodes a spec with all its fields."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values["mcp"] = dict(spec.mcp)
    for name in ("mcp", "instructions"):
        if not values[name]:
            del values[name]
    return values | {"hints": {field.name: getattr(spec.hints, field.name) for field in fields(Hints)}}


def spec_from_json(value: Mapping[str, Any]) -> ToolSpec:
    """Decodes a spec."""
    return ToolSpec(**{**value, "hints": Hints(**value["hints"])})


def tool_to_openai(spec: ToolSpec, *, strict: bool = False) -> dict[str, Any]:
    """An OpenAI function schema; with `strict`, in strict mode if that can express it, else marked `strict: false`."""
    function: dict[str, Any] = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    if strict:
        parameters = strict_schema(spec.parameters)
        function |= {"strict": False} if parameters is None else {"strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


def task_to_json(task: Task) -> dict[str, Any]:
    """The fields of a task that differ from the defaults."""
    values = {
        "id": task.id or None,
        "tools": None if task.tools is None else list(task.tools),
        "create": to_plain(task.create) or None,
        "feedback": task.feedback,
        "feedback_args": to_plain(task.feedback_args) or None,
        "ttl_s": task.ttl_s,
        "state": task.state or None,
        "hash_state": task.hash_state or None,
        "session_id": task.session_id or None,
    }
    return {name: value for name, value in values.items() if value is not None}

"""What crosses a gateway, as JSON that gives the same value back; bytes stand beside it under their digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Any

from gateway.plain import plain
from gateway.types import (
    Audio,
    Feedback,
    Hints,
    Image,
    Outcome,
    Part,
    Resource,
    Task,
    Text,
    ToolResult,
    ToolSpec,
    Video,
)

FORMAT = 1
"""A reader refuses any other; it grows when an older reader would misread a newer tape."""

Line = dict[str, Any]
Answer = ToolResult | Feedback

_PARTS: Mapping[str, Callable[..., Part]] = {
    "text": Text,
    "image": Image,
    "audio": Audio,
    "video": Video,
    "resource": Resource,
}


def answer_line(answer: Answer, blobs: dict[str, bytes]) -> Line:
    """Puts the bytes of the answer's media into `blobs`."""
    return _fields(answer, but="parts") | {"parts": [_part_line(part, blobs) for part in answer.parts]}


def result_of(line: Line, blob: Callable[[str], bytes]) -> ToolResult:
    return ToolResult(**_common(line, blob))


def feedback_of(line: Line, blob: Callable[[str], bytes]) -> Feedback:
    return Feedback(**_common(line, blob))


def digests(line: Line) -> list[str]:
    """The blobs that an answer needs."""
    return [part["blob"] for part in line["parts"] if "blob" in part]


def task_line(task: Task) -> Line:
    """Without a rollout that nobody named: siblings are then told apart by what they do."""
    return {name: value for name, value in _fields(task).items() if name != "rollout" or value}


def specs_line(specs: Sequence[ToolSpec]) -> list[Line]:
    return [_fields(spec) for spec in specs]


def specs_of(lines: Sequence[Line]) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec(**(line | {"hints": Hints(**line["hints"])})) for line in lines)


def _common(line: Line, blob: Callable[[str], bytes]) -> Line:
    parts = tuple(_part_of(part, blob) for part in line["parts"])
    return line | {"parts": parts, "outcome": Outcome(line["outcome"])}


def _part_line(part: Part, blobs: dict[str, bytes]) -> Line:
    line: Line = {"type": type(part).__name__.lower()} | _fields(part, but="data")
    if not isinstance(part, Text) and part.data is not None:
        line["blob"] = sha256(part.data).hexdigest()
        blobs[line["blob"]] = part.data
    return line


def _part_of(line: Line, blob: Callable[[str], bytes]) -> Part:
    given = {name: value for name, value in line.items() if name not in ("type", "blob")}
    if "blob" in line:
        given["data"] = blob(line["blob"])
    return _PARTS[line["type"]](**given)


def _fields(value: Any, but: str = "") -> Line:
    return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.name != but}

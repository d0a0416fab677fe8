"""Everything a tool answered arrives, in order; what cannot be read leaves a note in its place."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any

from mcp_types import SERVER_INFO_META_KEY

from gateway.types import EMPTY, Audio, Image, Outcome, Part, Resource, Text, ToolResult, Video

_UNREADABLE = "unreadable_parts"
_OUTCOMES = frozenset(Outcome)
_OURS = "mtrl/"
"""Begins every key of `_meta` that gateways speak among themselves."""


class _Unreadable(ValueError):
    pass


def to_result(raw: Mapping[str, Any]) -> ToolResult:
    """The result of `tools/call` as it came over the wire."""
    parts, unreadable = _parts(raw.get("content"))
    structured = raw.get("structuredContent")
    if structured is not None and not any(isinstance(part, Text) for part in parts):
        parts.append(Text(json.dumps(structured, ensure_ascii=False)))
    meta = raw.get("_meta")
    meta = meta if isinstance(meta, Mapping) else EMPTY
    metrics = meta.get(f"{_OURS}metrics")
    metrics = dict(metrics) if isinstance(metrics, Mapping) else {}
    if unreadable:
        metrics[_UNREADABLE] = unreadable
    reward = meta.get(f"{_OURS}reward")
    return ToolResult(
        tuple(parts),
        _outcome(raw, meta),
        reward=_number(reward),
        done=meta.get(f"{_OURS}done") is True,
        structured=structured,
        metrics=metrics,
        reason=_text(meta, f"{_OURS}reason") or ("the tool reported an error" if raw.get("isError") is True else None),
        meta={key: value for key, value in meta.items() if _of_the_tool(key)} or EMPTY,
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _of_the_tool(key: str) -> bool:
    """Since 2026 a server names itself in every answer; that, and what we have read, is not the tool's word."""
    return key != SERVER_INFO_META_KEY and not key.startswith(_OURS)


def _outcome(raw: Mapping[str, Any], meta: Mapping[str, Any]) -> Outcome:
    """A gateway behind this one says more than an error flag can."""
    said = meta.get(f"{_OURS}outcome")
    if isinstance(said, str) and said in _OUTCOMES:
        return Outcome(said)
    return Outcome.ERROR if raw.get("isError") is True else Outcome.OK


def _parts(content: Any) -> tuple[list[Part], int]:
    if isinstance(content, str):
        return [Text(content)], 1
    if not isinstance(content, list):
        return [], 0
    parts: list[Part] = []
    unreadable = 0
    for item in content:
        try:
            parts.append(_part(item))
        except _Unreadable as error:
            unreadable += 1
            parts.append(Text(f"[a part that cannot be shown: {error}]"))
    return parts, unreadable


def _part(item: Any) -> Part:
    match item:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image", "data": str(data)}:
            return Image(_bytes(data), _mime(item) or "image/png")
        case {"type": "audio", "data": str(data)}:
            return Audio(_bytes(data), _mime(item) or "audio/wav")
        case {"type": "resource", "resource": {"uri": str(uri)} as resource}:
            return _resource(uri, resource, item.get("_meta"))
        case {"type": "resource_link", "uri": str(uri)}:
            return Resource(uri, _mime(item), name=_text(item, "name"), description=_text(item, "description"))
        case {"type": str(kind)}:
            raise _Unreadable(f"its type is {kind[:40]!r}" if kind not in _KNOWN else f"{kind} without its content")
    raise _Unreadable("it has no type")


_KNOWN = ("text", "image", "audio", "resource", "resource_link")


def _resource(uri: str, resource: Mapping[str, Any], meta: Any) -> Part:
    mime, blob = _mime(resource), resource.get("blob")
    meta = meta if isinstance(meta, Mapping) else EMPTY
    name, description = _text(meta, f"{_OURS}name"), _text(meta, f"{_OURS}description")
    if not isinstance(blob, str):
        return Resource(uri, mime, text=_text(resource, "text") or "", name=name, description=description)
    data = _bytes(blob)
    for kind, prefix in ((Image, "image/"), (Audio, "audio/"), (Video, "video/")):
        if mime is not None and mime.startswith(prefix):
            return kind(data, mime)
    return Resource(uri, mime, data=data, name=name, description=description)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Unreadable("its data is not base64") from error


def _mime(item: Mapping[str, Any]) -> str | None:
    return _text(item, "mimeType")


def _text(item: Mapping[str, Any], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) else None

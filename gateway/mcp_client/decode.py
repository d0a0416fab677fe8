"""Converts a raw `tools/call` result into a `ToolResult`; a part that cannot be read is replaced by a note."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

from mcp_types import SERVER_INFO_META_KEY

from gateway.large_json import TEXT_ENCODER, is_large, write_json
from gateway.types import EMPTY, Audio, Image, Outcome, Part, Resource, Text, ToolResult, Video

_UNREADABLE_METRIC = "unreadable_parts"
_OUTCOMES = frozenset(Outcome)
META_PREFIX = "mtrl/"
"""Prefix of the `_meta` keys that one gateway sends to another."""

_BASE64_PIECE = 1_048_576
"""Characters; a multiple of four."""
HEAVY_LENGTH = 262_144
"""Larger results are decoded in a thread."""


def is_heavy(raw: Mapping[str, Any]) -> bool:
    """Whether `to_result` takes long for a raw result."""
    return is_large(raw, HEAVY_LENGTH)


class _UnreadablePart(ValueError):
    pass


def to_result(raw: Mapping[str, Any]) -> ToolResult:
    """The result for one raw `tools/call` result; malformed fields are ignored rather than raised."""
    parts, unreadable = _decode_parts(raw.get("content"))
    structured = raw.get("structuredContent")
    if structured is not None and not any(isinstance(part, Text) for part in parts):
        parts.append(Text(write_json(TEXT_ENCODER, structured)))
    meta = raw.get("_meta")
    meta = meta if isinstance(meta, Mapping) else EMPTY
    metrics = meta.get(f"{META_PREFIX}metrics")
    metrics = dict(metrics) if isinstance(metrics, Mapping) else {}
    if unreadable:
        metrics[_UNREADABLE_METRIC] = unreadable
    reward = meta.get(f"{META_PREFIX}reward")
    return ToolResult(
        tuple(parts),
        _decode_outcome(raw, meta),
        reward=_to_finite_float(reward),
        done=meta.get(f"{META_PREFIX}done") is True,
        structured=structured,
        metrics=metrics,
        reason=_get_text(meta, f"{META_PREFIX}reason")
        or ("the tool reported an error" if raw.get("isError") is True else None),
        meta=upstream_meta(meta) or EMPTY,
    )


def _to_finite_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def upstream_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A server's own `_meta`: without the server info that is sent since 2026, and without what a gateway adds."""
    return {
        key: value for key, value in meta.items() if key != SERVER_INFO_META_KEY and not key.startswith(META_PREFIX)
    }


def _decode_outcome(raw: Mapping[str, Any], meta: Mapping[str, Any]) -> Outcome:
    """The outcome sent by another gateway, else the one that the error flag implies."""
    outcome = meta.get(f"{META_PREFIX}outcome")
    if isinstance(outcome, str) and outcome in _OUTCOMES:
        return Outcome(outcome)
    return Outcome.ERROR if raw.get("isError") is True else Outcome.OK


def _decode_parts(content: Any) -> tuple[list[Part], int]:
    if isinstance(content, str):
        return [Text(content)], 1
    if not isinstance(content, list):
        return [], 0
    parts: list[Part] = []
    unreadable = 0
    for item in content:
        try:
            parts.append(_decode_part(item))
        except _UnreadablePart as error:
            unreadable += 1
            parts.append(Text(f"[a part that cannot be shown: {error}]"))
    return parts, unreadable


def _decode_part(item: Any) -> Part:
    match item:
        case {"type": "text", "text": str(text)}:
            return Text(text)
        case {"type": "image", "data": str(data)}:
            return Image(_decode_base64(data), _get_mime(item) or "image/png")
        case {"type": "audio", "data": str(data)}:
            return Audio(_decode_base64(data), _get_mime(item) or "audio/wav")
        case {"type": "resource", "resource": {"uri": str(uri)} as resource}:
            return _decode_resource(uri, resource, item.get("_meta"))
        case {"type": "resource_link", "uri": str(uri)}:
            return Resource(
                uri, _get_mime(item), name=_get_text(item, "name"), description=_get_text(item, "description")
            )
        case {"type": str(kind)}:
            raise _UnreadablePart(
                f"its type is {kind[:40]!r}" if kind not in _PART_TYPES else f"{kind} without its content"
            )
    raise _UnreadablePart("it has no type")


_PART_TYPES = ("text", "image", "audio", "resource", "resource_link")


def _decode_resource(uri: str, resource: Mapping[str, Any], meta: Any) -> Part:
    mime, blob = _get_mime(resource), resource.get("blob")
    meta = meta if isinstance(meta, Mapping) else EMPTY
    name, description = _get_text(meta, f"{META_PREFIX}name"), _get_text(meta, f"{META_PREFIX}description")
    if not isinstance(blob, str):
        return Resource(uri, mime, text=_get_text(resource, "text") or "", name=name, description=description)
    data = _decode_base64(blob)
    for kind, prefix in ((Image, "image/"), (Audio, "audio/"), (Video, "video/")):
        if mime is not None and mime.startswith(prefix):
            return kind(data, mime)
    return Resource(uri, mime, data=data, name=name, description=description)


def _decode_base64(text: str) -> bytes:
    """Decodes in pieces, since a long text would hold the interpreter."""
    try:
        if "=" in text[:-2]:
            raise binascii.Error("padding within the data")
        pieces = (text[start : start + _BASE64_PIECE] for start in range(0, len(text), _BASE64_PIECE))
        return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    except (binascii.Error, ValueError) as error:
        raise _UnreadablePart("its data is not base64") from error


def _get_mime(item: Mapping[str, Any]) -> str | None:
    return _get_text(item, "mimeType")


def _get_text(item: Mapping[str, Any], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) else None

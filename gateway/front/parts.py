"""What leaves for an MCP client keeps all its meaning, so that a gateway behind a gateway loses nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from mcp_types import SERVER_INFO_META_KEY

from gateway.types import Audio, Hints, Image, Json, Outcome, Part, Resource, Text, ToolResult, ToolSpec, Video

OURS = "mtrl/"
"""Begins every key of `_meta` that gateways speak among themselves."""


def to_tool(spec: ToolSpec, *, modern: bool) -> dict[str, Any]:
    """A spec as `tools/list` shows it; the schemas stay exactly as their owner wrote them."""
    tool: dict[str, Any] = {"name": spec.name, "description": spec.description, "inputSchema": _rooted(spec.parameters)}
    if spec.hints.title is not None:
        tool["title"] = spec.hints.title
    if spec.output is not None and (modern or spec.output.get("type") == "object"):
        tool["outputSchema"] = dict(spec.output)
    if annotations := _annotations(spec.hints):
        tool["annotations"] = annotations
    return tool


def _rooted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are always an object, and the wire wants to see that said."""
    return dict(schema) if schema.get("type") == "object" else {**schema, "type": "object"}


def _annotations(hints: Hints) -> dict[str, Any]:
    said = {
        "title": hints.title,
        "readOnlyHint": hints.read_only or None,
        "destructiveHint": hints.destructive,
        "idempotentHint": hints.idempotent or None,
        "openWorldHint": hints.open_world,
    }
    return {name: value for name, value in said.items() if value is not None}


def to_answer(result: ToolResult, *, modern: bool) -> dict[str, Any]:
    """A result as `tools/call` answers it."""
    answer: dict[str, Any] = {
        "resultType": "complete",
        "content": [to_block(part) for part in result.parts],
        "isError": result.outcome is not Outcome.OK,
        "_meta": _meta(result),
    }
    if _fits(result.structured, modern=modern):
        answer["structuredContent"] = result.structured
    return answer


def _fits(structured: Json, *, modern: bool) -> bool:
    """Until 2026 it had to be an object; the text beside it holds the same."""
    return isinstance(structured, dict) or (modern and structured is not None)


def _meta(result: ToolResult) -> dict[str, Any]:
    said = {
        f"{OURS}outcome": result.outcome.value,
        f"{OURS}reason": result.reason,
        f"{OURS}reward": result.reward,
        f"{OURS}done": result.done or None,
        f"{OURS}metrics": _plain(result.metrics) or None,
    }
    return {**foreign(result.meta), **{key: value for key, value in said.items() if value is not None}}


def foreign(meta: Mapping[str, Any]) -> dict[str, Any]:
    """An upstream's own `_meta`, without what it says of itself: on this connection it would be untrue."""
    return {key: value for key, value in meta.items() if key != SERVER_INFO_META_KEY and not key.startswith(OURS)}


def _plain(metrics: Mapping[str, Any]) -> Any:
    """A tool may report anything; what is not JSON is said in words."""
    return json.loads(json.dumps(dict(metrics), default=str))


def to_block(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image():
            return {"type": "image", "data": _base64(part.data), "mimeType": part.mime}
        case Audio():
            return {"type": "audio", "data": _base64(part.data), "mimeType": part.mime}
        case Video():
            # MCP has no block for a film, so it travels as a document that holds one.
            uri = f"mtrl://video/{part.digest}"
            return {"type": "resource", "resource": {"uri": uri, "mimeType": part.mime, "blob": _base64(part.data)}}
        case Resource():
            return _of_resource(part)


def _of_resource(part: Resource) -> dict[str, Any]:
    common = {"uri": part.uri} if part.mime is None else {"uri": part.uri, "mimeType": part.mime}
    words = {"name": part.name, "description": part.description}
    if part.text is None and part.data is None:
        link = {"type": "resource_link", **common, **words, "name": part.name or part.uri}
        return {key: value for key, value in link.items() if value is not None}
    content = {"text": part.text} if part.data is None else {"blob": _base64(part.data)}
    meta = {f"{OURS}{key}": value for key, value in words.items() if value is not None}
    block = {"type": "resource", "resource": {**common, **content}}
    return {**block, "_meta": meta} if meta else block


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")

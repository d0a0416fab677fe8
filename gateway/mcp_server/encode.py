"""Encodes specs and results for MCP clients; what MCP cannot express travels in `_meta`, so gateways can be chained."""

from __future__ import annotations

from typing import Any

from gateway.mcp_client.decode import META_PREFIX, upstream_meta
from gateway.types import Audio, Hints, Image, Outcome, Part, Resource, Text, ToolResult, ToolSpec, Video
from gateway.wire import to_base64, to_plain


def to_tool(spec: ToolSpec, *, modern: bool) -> dict[str, Any]:
    """A spec as a tool in `tools/list`; schemas are passed on exactly as their owner wrote them."""
    tool: dict[str, Any] = {
        "name": spec.name,
        "description": spec.description,
        "inputSchema": {**spec.parameters, "type": "object"},  # MCP requires the type at its top.
        **spec.mcp,
    }
    if spec.hints.title is not None:
        tool["title"] = spec.hints.title
    if spec.output is not None and (modern or spec.output.get("type") == "object"):
        tool["outputSchema"] = dict(spec.output)
    if annotations := _annotations(spec.hints):
        tool["annotations"] = annotations
    return tool


def _annotations(hints: Hints) -> dict[str, Any]:
    fields = {
        "title": hints.title,
        "readOnlyHint": hints.read_only or None,
        "destructiveHint": hints.destructive,
        "idempotentHint": hints.idempotent or None,
        "openWorldHint": hints.open_world,
    }
    return {name: value for name, value in fields.items() if value is not None}


def to_call_result(result: ToolResult, *, modern: bool) -> dict[str, Any]:
    """A tool result as the result of `tools/call`."""
    call_result: dict[str, Any] = {
        "resultType": "complete",
        "content": [to_content_block(part) for part in result.parts],
        "isError": result.outcome is not Outcome.OK,
        "_meta": _result_meta(result),
    }
    structured = to_plain(result.structured)
    # Versions before 2026 allow only an object; other values are then sent as text alone.
    if isinstance(structured, dict) or (modern and structured is not None):
        call_result["structuredContent"] = structured
    return call_result


def _result_meta(result: ToolResult) -> dict[str, Any]:
    fields = {
        f"{META_PREFIX}outcome": result.outcome.value,
        f"{META_PREFIX}reason": result.reason,
        f"{META_PREFIX}reward": result.reward,
        f"{META_PREFIX}done": result.done or None,
        f"{META_PREFIX}metrics": to_plain(result.metrics) if result.metrics else None,
    }
    own = upstream_meta(to_plain(result.meta)) if result.meta else {}
    return own | {key: value for key, value in fields.items() if value is not None}


def to_content_block(part: Part) -> dict[str, Any]:
    """One part of a result as an MCP content block."""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image():
            return {"type": "image", "data": to_base64(part.data), "mimeType": part.mime}
        case Audio():
            return {"type": "audio", "data": to_base64(part.data), "mimeType": part.mime}
        case Video():
            # MCP has no video block, so a video is sent as an embedded resource.
            uri = f"mtrl://video/{part.digest}"
            return {"type": "resource", "resource": {"uri": uri, "mimeType": part.mime, "blob": to_base64(part.data)}}
        case Resource():
            return _resource_block(part)


def _resource_block(part: Resource) -> dict[str, Any]:
    common = {"uri": part.uri} if part.mime is None else {"uri": part.uri, "mimeType": part.mime}
    labels = {"name": part.name, "description": part.description}
    if part.text is None and part.data is None:
        link = {"type": "resource_link", **common, **labels, "name": part.name or part.uri}
        return {key: value for key, value in link.items() if value is not None}
    content = {"text": part.text} if part.data is None else {"blob": to_base64(part.data)}
    meta = {f"{META_PREFIX}{key}": value for key, value in labels.items() if value is not None}
    block = {"type": "resource", "resource": {**common, **content}}
    return {**block, "_meta": meta} if meta else block

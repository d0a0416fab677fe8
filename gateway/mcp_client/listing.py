"""Reads and checks a server's tool listing; a malformed tool is quarantined with a reason and hides no other tool.

That includes tools whose schema refers back to itself without descending into the value: validation would not end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anyio import to_thread
from mcp.shared.inbound import find_invalid_x_mcp_header, x_mcp_header_map

from gateway.mcp_client.connection import Connection
from gateway.mcp_client.messages import CUT_KEY
from gateway.mcp_client.protocol_version import HeaderMap
from gateway.mcp_client.rollout_folder import to_policy
from gateway.schema import ArgumentChecker, SchemaError, checker_for
from gateway.schema_budget import in_place_subschemas
from gateway.types import EMPTY, Hints, ToolSpec


def find_ref_cycle(schema: Mapping[str, Any]) -> str | None:
    """The `$ref` by which a schema reaches itself without descending into the value, or None.

    Recursion through `properties` or `items` is fine: every step consumes some of the value.
    """
    done: set[int] = set()
    for node in _walk_schema(schema):
        if (cycle := _find_cycle_from(schema, node, done)) is not None:
            return cycle
    return None


def _walk_schema(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _find_cycle_from(schema: Mapping[str, Any], start: Mapping[str, Any], done: set[int]) -> str | None:
    """Depth-first search over in-place subschemas; `done` are known to be free of cycles."""
    path: set[int] = set()
    stack: list[tuple[Mapping[str, Any], str, bool]] = [(start, "", False)]
    while stack:
        node, via, leaving = stack.pop()
        if leaving:
            path.discard(id(node))
            done.add(id(node))
        elif id(node) in path:
            return via
        elif id(node) not in done:
            path.add(id(node))
            stack.append((node, via, True))
            stack.extend(
                (subschema, reference or via, False) for subschema, reference in in_place_subschemas(schema, node)
            )
    return None


MAX_PAGES = 100
MAX_TOOLS = 3_000
"""More tools of one server would hold the event loop whenever the table of all tools is built."""
MAX_LISTING_BYTES = 32 * 1024 * 1024
"""All tools of one server together."""
MAX_TOOL_BYTES = 256 * 1024
"""A larger description and schema would fill the policy's context."""


@dataclass(frozen=True)
class ToolListing:
    """A server's valid tools, and the quarantined ones."""

    specs: tuple[ToolSpec, ...] = ()
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Tool -> why it is not offered."""
    header_maps: Mapping[str, HeaderMap] = field(default_factory=dict)
    checkers: tuple[ArgumentChecker, ...] = field(default=(), repr=False)
    """Held so that those who offer the tools need not compile their schemas again."""
    catalog: Mapping[str, str] = field(default_factory=dict)
    """Tools that stand for a method on resources or prompts, each with the method."""

    @cached_property
    def by_name(self) -> Mapping[str, ToolSpec]:
        return {spec.name: spec for spec in self.specs}


class _MalformedTool(ValueError):
    pass


async def read_listing(connection: Connection, owner: str) -> ToolListing:
    """Requests every page of `tools/list` and parses the tools."""
    if "tools" not in connection.protocol.capabilities:
        return ToolListing()
    folder = connection.transport.folder
    parser = ListingParser(owner, modern=connection.protocol.is_modern, folder=folder)
    params: dict[str, Any] = {}
    truncation = ""
    for page in range(1, MAX_PAGES + 1):
        result = await connection.request("tools/list", params)
        page_tools, cursor = result.get("tools"), result.get("nextCursor")
        if isinstance(page_tools, list):
            await to_thread.run_sync(parser.add_page, page_tools, abandon_on_cancel=True)
        if isinstance(meta := result.get("_meta"), dict) and CUT_KEY in meta:
            truncation = str(meta[CUT_KEY])
            break
        if not isinstance(cursor, str) or cursor == params.get("cursor"):
            break
        params = {"cursor": cursor}
        if page == MAX_PAGES or parser.is_full:
            truncation = f"the listing did not end after {page} pages; the remaining tools are not offered"
            break
    listing = parser.listing
    connection.protocol.header_maps = listing.header_maps
    if truncation:
        listing = replace(listing, quarantined={**listing.quarantined, "(listing)": truncation})
    return listing


class ListingParser:
    """Builds a listing page by page, so that no page is kept longer than its tools are read."""

    def __init__(self, owner: str, *, modern: bool, folder: Path | None = None) -> None:
        """`folder` is that of the server's process, whose path the policy knows by another name."""
        self._owner, self._modern, self._folder = owner, modern, folder
        self._specs: dict[str, ToolSpec] = {}
        self._quarantined: dict[str, str] = {}
        self._header_maps: dict[str, HeaderMap] = {}
        self._checkers: list[ArgumentChecker] = []
        self._count = self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no more tools are read."""
        return self._count >= MAX_TOOLS

    @property
    def listing(self) -> ToolListing:
        return ToolListing(tuple(self._specs.values()), self._quarantined, self._header_maps, tuple(self._checkers))

    def add_page(self, tools: list[Any]) -> None:
        """Reads the tools of a page, in a thread."""
        for tool in tools[: MAX_TOOLS - self._count]:
            try:
                self._add(tool)
            except (_MalformedTool, SchemaError, RecursionError) as error:
                label, others = _tool_label(tool, self._count), (self._specs, self._quarantined)
                is_taken = any(label in names for names in others)
                self._quarantined[f"{label} (#{self._count})" if is_taken else label] = str(error)
            self._count += 1
        if len(tools) > MAX_TOOLS:
            self._quarantined["(listing)"] = f"only the first {MAX_TOOLS} tools are offered"

    def _add(self, tool: Any) -> None:
        spec, size = _parse_tool(to_policy(tool, self._folder), self._owner)
        if spec.name in self._specs:
            raise _MalformedTool("an earlier tool has the same name")
        if self._bytes + size > MAX_LISTING_BYTES:
            raise _MalformedTool(f"this and earlier tools take more than {MAX_LISTING_BYTES} bytes together")
        checker = checker_for(spec.parameters)
        if self._modern and (reason := find_invalid_x_mcp_header(spec.parameters)) is not None:
            raise _MalformedTool(reason)
        self._checkers.append(checker)
        self._bytes += size
        self._specs[spec.name] = spec
        if self._modern and (header_map := x_mcp_header_map(spec.parameters)):
            self._header_maps[spec.name] = header_map


def _tool_label(tool: Any, index: int) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return name[:200] if isinstance(name, str) and name else f"#{index}"


def _parse_tool(tool: Any, owner: str) -> tuple[ToolSpec, int]:
    """The spec, and its size in bytes."""
    if not isinstance(tool, dict):
        raise _MalformedTool("it is not an object")
    name, parameters = tool.get("name"), tool.get("inputSchema")
    if not isinstance(name, str) or not name:
        raise _MalformedTool("it has no name")
    if not isinstance(parameters, dict):
        raise _MalformedTool("it has no `inputSchema`")
    if parameters.get("type") != "object":
        raise _MalformedTool("its `inputSchema` is not of `type: object`")
    size = len(json.dumps(tool))
    if size > MAX_TOOL_BYTES:
        raise _MalformedTool(f"its description and schema take {size} bytes, more than {MAX_TOOL_BYTES}")
    if (reference := find_ref_cycle(parameters)) is not None:
        raise _MalformedTool(f"its `inputSchema` refers back to itself through {reference!r}")
    output = tool.get("outputSchema")
    spec = ToolSpec(
        name,
        _as_text(tool.get("description")) or "",
        parameters,
        hints=_parse_hints(tool, tool.get("annotations")),
        output=output if isinstance(output, dict) else None,
        owner=owner,
        mcp={key: tool[key] for key in _PASSED_ON if key in tool} or EMPTY,
    )
    return spec, size


_PASSED_ON = ("_meta", "execution", "icons")


def _parse_hints(tool: Mapping[str, Any], annotations: Any) -> Hints:
    """The hints in a tool's annotations; only a literal `true` counts as yes."""
    hints = annotations if isinstance(annotations, Mapping) else {}
    return Hints(
        title=_as_text(tool.get("title")) or _as_text(hints.get("title")),
        read_only=hints.get("readOnlyHint") is True,
        idempotent=hints.get("idempotentHint") is True,
        destructive=_as_flag(hints.get("destructiveHint")),
        open_world=_as_flag(hints.get("openWorldHint")),
    )


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None

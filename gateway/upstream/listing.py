"""A listing is read leniently: what is malformed is set aside with its reason and hides nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mcp.shared.inbound import find_invalid_x_mcp_header, x_mcp_header_map

from gateway.schema import Checker, SchemaError
from gateway.types import Hints, ToolSpec
from gateway.upstream.connection import Connection
from gateway.upstream.era import HeaderMap
from gateway.upstream.loops import loop

MOST_PAGES = 100
MOST_TOOLS = 10_000
MOST_BYTES = 256 * 1024
"""A larger tool is no use to a policy: its schema alone would fill the context."""


@dataclass(frozen=True)
class Listing:
    specs: tuple[ToolSpec, ...] = ()
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Tool -> why it is not offered."""
    header_maps: Mapping[str, HeaderMap] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> Mapping[str, ToolSpec]:
        return {spec.name: spec for spec in self.specs}


class _Malformed(ValueError):
    pass


async def read(connection: Connection, owner: str) -> Listing:
    """Every page of what the server offers."""
    if "tools" not in connection.era.capabilities:
        return Listing()
    raw: list[Any] = []
    params: dict[str, Any] = {}
    remark = ""
    for page in range(1, MOST_PAGES + 1):
        result = await connection.request("tools/list", params)
        tools, cursor = result.get("tools"), result.get("nextCursor")
        raw += tools if isinstance(tools, list) else []
        if not isinstance(cursor, str) or cursor == params.get("cursor"):
            break
        params = {"cursor": cursor}
        if page == MOST_PAGES or len(raw) > MOST_TOOLS:
            remark = f"the listing did not end after {page} pages; the rest is not offered"
            break
    listing = sift(raw, owner, modern=connection.era.modern)
    connection.era.header_maps = listing.header_maps
    return (
        Listing(listing.specs, {**listing.quarantined, "(listing)": remark}, listing.header_maps) if remark else listing
    )


def sift(raw: list[Any], owner: str, *, modern: bool = False) -> Listing:
    specs: dict[str, ToolSpec] = {}
    quarantined: dict[str, str] = {}
    header_maps: dict[str, HeaderMap] = {}
    for index, tool in enumerate(raw):
        try:
            spec = _spec(tool, owner)
            if spec.name in specs:
                raise _Malformed("its name is taken by a tool before it")
            if modern and (reason := find_invalid_x_mcp_header(spec.parameters)) is not None:
                raise _Malformed(reason)
        except (_Malformed, SchemaError, RecursionError) as error:
            label = _label(tool, index)
            quarantined[f"{label} (#{index})" if label in specs or label in quarantined else label] = str(error)
            continue
        specs[spec.name] = spec
        if modern and (header_map := x_mcp_header_map(spec.parameters)):
            header_maps[spec.name] = header_map
    return Listing(tuple(specs.values()), quarantined, header_maps)


def _label(tool: Any, index: int) -> str:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return name[:200] if isinstance(name, str) and name else f"#{index}"


def _spec(tool: Any, owner: str) -> ToolSpec:
    if not isinstance(tool, dict):
        raise _Malformed("it is not an object")
    name, parameters = tool.get("name"), tool.get("inputSchema")
    if not isinstance(name, str) or not name:
        raise _Malformed("it has no name")
    if not isinstance(parameters, dict):
        raise _Malformed("it has no `inputSchema`")
    if parameters.get("type") != "object":
        raise _Malformed("its `inputSchema` is not of `type: object`")
    size = len(json.dumps(tool))
    if size > MOST_BYTES:
        raise _Malformed(f"its description and schema take {size} bytes, more than {MOST_BYTES}")
    Checker(parameters)
    if (reference := loop(parameters)) is not None:
        raise _Malformed(f"its `inputSchema` comes back to itself by {reference!r}")
    output = tool.get("outputSchema")
    return ToolSpec(
        name,
        _text(tool.get("description")) or "",
        parameters,
        hints=_hints(tool, tool.get("annotations")),
        output=output if isinstance(output, dict) else None,
        owner=owner,
    )


def _hints(tool: Mapping[str, Any], annotations: Any) -> Hints:
    """What its owner promises; only a plain yes counts as one."""
    said = annotations if isinstance(annotations, Mapping) else {}
    return Hints(
        title=_text(tool.get("title")) or _text(said.get("title")),
        read_only=said.get("readOnlyHint") is True,
        idempotent=said.get("idempotentHint") is True,
        destructive=_flag(said.get("destructiveHint")),
        open_world=_flag(said.get("openWorldHint")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None

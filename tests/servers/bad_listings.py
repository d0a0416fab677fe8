"""Tool listings of the misbehaving server: malformed tools, many pages, endless pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faulty_tools import Tool
    from protocol import Shared

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def build_page(tools: Mapping[str, Tool], shared: Shared, cursor: str | None) -> dict[str, Any]:
    """One page of the listing, with the cursor of the next page if there is one."""
    flags = shared.flags
    listed_tools = [tool.listing(name) for name, tool in tools.items()]
    listed_tools += [tools["echo"].listing(f"echo-grown{number}") for number in range(1, shared.grown + 1)]
    if flags.bad_tools:
        listed_tools[1:1] = bad_tools()
    number = int(cursor or 0)
    size = -(-len(listed_tools) // flags.pages)
    more = {"nextCursor": str(number + 1)} if flags.endless_pages or number + 1 < flags.pages else {}
    return {"tools": listed_tools[number * size : (number + 1) * size], **more}


def bad_tools() -> list[Any]:
    """Tools that a client must quarantine, and tools with odd names; those named `echo-...` can be called.

    A JSON reader gives up near 200 levels, an event-stream reader near 1 MB: these can still be read.
    """
    return [
        {"name": "no_schema", "description": "Has no inputSchema."},
        {"name": "null_schema", "inputSchema": None},
        {"name": "array_schema", "inputSchema": {"type": "array", "items": {"type": "string"}}},
        {"name": "list_schema", "inputSchema": ["object"]},
        {"name": "wrong_type_schema", "inputSchema": {"type": "object", "properties": {"a": {"type": "strnig"}}}},
        {"name": "wrong_output_schema", "inputSchema": OBJECT, "outputSchema": {"type": "array"}},
        {"name": 42, "inputSchema": OBJECT},
        {"name": "", "inputSchema": OBJECT},
        {"inputSchema": OBJECT},
        "not a tool at all",
        {"name": "loop_schema", "inputSchema": cyclic_schema()},
        {"name": "dangling_schema", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}},
        {"name": "deep_schema", "inputSchema": deep_schema(60)},
        {"name": "large_schema", "inputSchema": OBJECT | {"description": "x" * 500_000}},
        {"name": "echo", "description": "Has a name that is taken.", "inputSchema": OBJECT},
        {"name": "echo-with spaces/and slashes", "description": "Has an odd name.", "inputSchema": OBJECT},
        {"name": "echo-größe_測試_🛠", "description": "Has an odd name.", "inputSchema": OBJECT},
        {"name": "echo-" + "long" * 49, "description": "Has a name of 201 characters.", "inputSchema": OBJECT},
    ]


def cyclic_schema() -> dict[str, Any]:
    """A schema with an endless cycle: two definitions that only refer to each other."""
    a, b = {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": a, "b": b}}


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema

"""Tool listings: all pages are read, malformed tools are quarantined, and changes are followed."""

from __future__ import annotations

import pytest

from gateway.mcp_client.listing import MAX_PAGES, ListingParser
from gateway.types import Hints
from tests.mcp_client.mcp_toolsets import TRANSPORTS, call_tool, misbehaving_toolset
from tests.waiting import wait_until

all_transports = pytest.mark.parametrize("transport", TRANSPORTS)


async def test_malformed_tools_are_quarantined_and_hide_no_other() -> None:
    async with misbehaving_toolset("http", "--bad-tools") as server:
        names = {spec.name for spec in server.specs}
        assert {"echo", "mixed", "echo-with spaces/and slashes", "echo-größe_測試_🛠"} <= names
        quarantined = server.status.quarantined
        is_bad = {"no_schema", "null_schema", "array_schema", "list_schema", "wrong_type_schema", "dangling_schema"}
        assert is_bad | {"loop_schema", "deep_schema", "large_schema"} <= quarantined.keys()
        assert not names & quarantined.keys()
        assert all(quarantined.values())
        assert (await call_tool(server, "echo", text="hello")).text == "hello"
        assert (await call_tool(server, "echo-größe_測試_🛠", text="odd")).text == "odd"


async def test_all_pages_of_a_listing_are_read() -> None:
    async with misbehaving_toolset("stdio") as single, misbehaving_toolset("stdio", "--pages", "5") as paged:
        assert paged.specs != () and [spec.name for spec in paged.specs] == [spec.name for spec in single.specs]


async def test_endless_listing_stops_at_the_page_limit() -> None:
    async with misbehaving_toolset("stdio", "--endless-pages") as server:
        assert "echo" in {spec.name for spec in server.specs}
        assert f"{MAX_PAGES} pages" in server.status.quarantined["(listing)"]


@all_transports
async def test_changed_listing_is_reloaded_and_unchanged_specs_stay_identical(transport: str) -> None:
    changes: list[int] = []
    async with misbehaving_toolset(transport) as server:
        before = server.specs
        server.on_change.append(lambda: changes.append(len(server.specs)))
        notifications: list[str] = []
        server.on_notification.append(lambda method, params: notifications.append(method))
        assert server.specs is before
        await call_tool(server, "grow")
        await wait_until(lambda: len(server.specs) == len(before) + 1)
        assert changes == [len(before) + 1]
        assert "notifications/tools/list_changed" in notifications
        assert (await call_tool(server, "echo-grown1", text="new")).text == "new"


def test_schemas_hints_and_headers_of_tools_are_taken_as_they_are_written() -> None:
    def tool(name: str, argument: dict[str, object], **more: object) -> dict[str, object]:
        return {"name": name, "inputSchema": {"type": "object", "properties": {"a": argument}, "x-own": True}, **more}

    good = tool("good", {"type": "string", "x-mcp-header": "Region"}, outputSchema={"type": "object"}, title="New")
    annotations = {"readOnlyHint": True, "idempotentHint": "true", "destructiveHint": False, "title": "Old"}
    parser = ListingParser("s", modern=True)
    parser.add_page([tool("bad", {"type": "number", "x-mcp-header": "A"}), {**good, "annotations": annotations}])
    (spec,) = parser.listing.specs
    assert (spec.parameters, spec.output) == (good["inputSchema"], {"type": "object"})
    assert spec.hints == Hints(title="New", read_only=True, destructive=False)
    assert "x-mcp-header" in parser.listing.quarantined["bad"]
    assert parser.listing.header_maps == {"good": {("a",): "Region"}}


@pytest.mark.parametrize(
    ("definitions", "is_bad"),
    [
        ({"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}, True),
        ({"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}, False),
        ({"a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}, "b": {"type": "string"}}, False),
    ],
)
def test_schema_with_an_in_place_ref_cycle_is_quarantined(definitions: dict[str, object], is_bad: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    parser = ListingParser("s", modern=False)
    parser.add_page([{"name": "t", "inputSchema": schema}])
    assert ("t" in parser.listing.quarantined) == is_bad == (not parser.listing.specs)

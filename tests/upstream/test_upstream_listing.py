"""What a server lists is what is offered: every page, without the malformed, and never forgotten."""

from __future__ import annotations

import pytest

from gateway.types import Hints
from gateway.upstream.listing import MOST_PAGES, sift
from tests.upstream.reach import TRANSPORTS, call, eventually, reached

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)
OBJECT = {"type": "object", "properties": {}}


@everywhere
async def test_a_malformed_tool_is_set_aside_and_hides_no_other(transport: str) -> None:
    async with reached(transport, "--bad-tools") as server:
        names = {spec.name for spec in server.specs}
        assert {"echo", "mixed", "echo-with spaces/and slashes", "echo-größe_測試_🛠"} <= names
        quarantined = server.status.quarantined
        bad = {"no_schema", "null_schema", "array_schema", "list_schema", "wrong_type_schema", "dangling_schema"}
        assert bad | {"loop_schema", "deep_schema", "large_schema"} <= quarantined.keys()
        assert not names & quarantined.keys()
        assert all(quarantined.values())
        assert (await call(server, "echo", text="hello")).text == "hello"
        assert (await call(server, "echo-größe_測試_🛠", text="odd")).text == "odd"


@everywhere
async def test_every_page_of_a_listing_is_read(transport: str) -> None:
    async with reached(transport) as one, reached(transport, "--pages", "5") as paged:
        assert paged.specs != () and [spec.name for spec in paged.specs] == [spec.name for spec in one.specs]


async def test_a_listing_without_end_is_ended() -> None:
    async with reached("stdio", "--endless-pages") as server:
        assert "echo" in {spec.name for spec in server.specs}
        assert f"{MOST_PAGES} pages" in server.status.quarantined["(listing)"]


@everywhere
async def test_a_changed_listing_is_read_again_and_an_unchanged_one_is_the_same_object(transport: str) -> None:
    changes: list[int] = []
    async with reached(transport) as server:
        before = server.specs
        server.on_change.append(lambda: changes.append(len(server.specs)))
        notices: list[str] = []
        server.on_notice.append(lambda method, params: notices.append(method))
        assert server.specs is before
        await call(server, "grow")
        await eventually(lambda: len(server.specs) == len(before) + 1)
        assert changes == [len(before) + 1]
        assert "notifications/tools/list_changed" in notices
        assert (await call(server, "echo-grown1", text="new")).text == "new"


def test_a_schema_is_passed_on_as_it_came() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "default": None}},
        "$defs": {"x": {"type": "array", "items": {"enum": [1, "two"]}}},
        "x-own": True,
    }
    tool = {"name": "t", "description": "d", "inputSchema": schema, "outputSchema": {"type": "object"}}
    (spec,) = sift([tool], "mcp server 's'").specs
    assert spec.parameters == schema and spec.output == {"type": "object"} and spec.owner == "mcp server 's'"


def test_hints_are_read_and_only_a_plain_yes_counts() -> None:
    said = {"readOnlyHint": True, "idempotentHint": "true", "destructiveHint": False, "title": "Old"}
    (spec,) = sift([{"name": "t", "title": "New", "inputSchema": OBJECT, "annotations": said}], "s").specs
    assert spec.hints == Hints(title="New", read_only=True, destructive=False)


def test_a_header_annotation_that_cannot_be_sent_quarantines_its_tool() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "x-mcp-header": "A"}}}
    good = {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "Region"}}}
    listing = sift([{"name": "bad", "inputSchema": schema}, {"name": "good", "inputSchema": good}], "s", modern=True)
    assert [spec.name for spec in listing.specs] == ["good"] and "x-mcp-header" in listing.quarantined["bad"]
    assert listing.header_maps == {"good": {("a",): "Region"}}


@pytest.mark.parametrize(
    ("definitions", "bad"),
    [
        ({"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, True),
        ({"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}}, True),
        ({"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}, False),
        ({"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, False),
        ({"a": {"allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]}, "b": {"type": "string"}}, False),
    ],
)
def test_a_schema_that_only_leads_back_to_itself_is_set_aside(definitions: dict[str, object], bad: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    listing = sift([{"name": "t", "inputSchema": schema}], "s")
    assert (len(listing.specs), "t" in listing.quarantined) == ((0, True) if bad else (1, False))

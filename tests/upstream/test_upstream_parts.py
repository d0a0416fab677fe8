"""What a tool answered arrives whole and in order, and a reader of the operator's own may read it differently."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Audio, Image, Outcome, Resource, Text, ToolResult
from gateway.upstream.hook import MCPBaseTool, parsed
from gateway.upstream.parts import to_result
from tests.upstream.reach import call, reached

PIXEL = base64.b64encode(b"pixel").decode()
IMAGE = {"type": "image", "data": PIXEL, "mimeType": "image/jpeg"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_parts_keep_their_kind_and_their_order() -> None:
    content = [
        text("a"),
        IMAGE,
        {"type": "audio", "data": PIXEL, "mimeType": "audio/mpeg"},
        {"type": "resource", "resource": {"uri": "u:1", "mimeType": "text/plain", "text": "t"}},
        {"type": "resource", "resource": {"uri": "u:2", "mimeType": "image/png", "blob": PIXEL}},
        {"type": "resource", "resource": {"uri": "u:3", "mimeType": "application/pdf", "blob": PIXEL}},
        {"type": "resource_link", "uri": "u:4", "name": "n", "description": "d", "mimeType": "text/html"},
        text("b"),
    ]
    assert to_result({"content": content}).parts == (
        Text("a"),
        Image(b"pixel", "image/jpeg"),
        Audio(b"pixel", "audio/mpeg"),
        Resource("u:1", "text/plain", text="t"),
        Image(b"pixel", "image/png"),
        Resource("u:3", "application/pdf", data=b"pixel"),
        Resource("u:4", "text/html", name="n", description="d"),
        Text("b"),
    )


def test_structured_content_stands_beside_text_and_becomes_it_where_there_is_none() -> None:
    structured = {"größe": 3}
    both = to_result({"content": [text("three")], "structuredContent": structured})
    assert (both.parts, both.structured) == ((Text("three"),), structured)
    alone = to_result({"content": [IMAGE], "structuredContent": structured})
    assert alone.parts == (Image(b"pixel", "image/jpeg"), Text('{"größe": 3}'))
    assert to_result({"structuredContent": [1, 2]}).text == "[1, 2]"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "hologram"},
        {"type": "image", "data": "*", "mimeType": "image/png"},
        {"type": "image"},
        {"type": "text", "text": 3},
        {"type": "resource", "resource": "none"},
        {},
        None,
        "bare",
    ],
)
def test_a_part_that_cannot_be_read_leaves_a_note_and_is_counted(item: Any) -> None:
    result = to_result({"content": [text("before"), item, text("after")]})
    assert result.outcome is Outcome.OK
    assert result.parts[0] == Text("before") and result.parts[2] == Text("after")
    assert isinstance(result.parts[1], Text) and "cannot be shown" in result.parts[1].text
    assert result.metrics["unreadable_parts"] == 1


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(["type", "text"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["content", "structuredContent", "isError", "_meta", "resultType"]), anything))
def test_no_result_makes_a_call_fail(raw: dict[str, Any]) -> None:
    assert isinstance(to_result(raw), ToolResult)


def test_what_a_gateway_behind_this_one_says_of_a_result_is_kept() -> None:
    meta = {"mtrl/reward": 0.5, "mtrl/done": True, "mtrl/metrics": {"hits": 3}, "mtrl/outcome": "timeout", "own": 1}
    result = to_result({"content": [], "isError": True, "_meta": meta})
    assert (result.reward, result.done, result.metrics, result.outcome) == (0.5, True, {"hits": 3}, Outcome.TIMEOUT)
    assert result.meta == {"own": 1}
    strange = {"mtrl/reward": "much", "mtrl/done": 1, "mtrl/metrics": [], "mtrl/outcome": "great"}
    plain = to_result({"content": [], "_meta": strange})
    assert (plain.reward, plain.done, plain.metrics, plain.outcome) == (None, False, {}, Outcome.OK)


class Shouting(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        words = " ".join(item.text.upper() for item in content if item.type == "text")
        kinds = {item.mimeType for item in content} | {item.mime_type for item in content}
        return words, {"kinds": sorted(kind for kind in kinds if kind), "named": self.tool_schema.function.name}


class Rewarding(MCPBaseTool):
    def parse_result(self, result: ToolResult) -> ToolResult:
        return replace(result, reward=float(len(result.parts)), done=True)


class Broken(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        raise KeyError("answer")


async def test_a_reading_in_the_older_form_replaces_the_text_and_keeps_the_rest() -> None:
    async with reached("stdio", parse={"mixed": Shouting}) as server:
        result = await call(server, "mixed")
        assert [type(part) for part in result.parts] == [Text, Image, Audio, Resource, Resource]
        assert result.text == "BEFORE AFTER"
        assert result.metrics["kinds"] == ["audio/wav", "image/png", "text/plain"]
        assert result.metrics["named"] == "mixed"
        assert (await call(server, "echo", text="quiet")).text == "quiet"


async def test_a_reading_for_every_tool_sees_and_returns_all_parts() -> None:
    async with reached("stdio", parse={"*": Rewarding({}), "echo": MCPBaseTool}) as server:
        result = await call(server, "mixed")
        assert (result.reward, result.done) == (6.0, True)
        assert (await call(server, "echo", text="x")).reward is None


async def test_a_reading_that_fails_costs_its_reading_and_not_the_call() -> None:
    async with reached("stdio", parse={"*": Broken}) as server:
        result = await call(server, "echo", text="still here")
        assert (result.outcome, result.text) == (Outcome.OK, "still here")
        assert result.metrics["parse_failed"] == 1 and "Broken" in (result.reason or "")


def test_nested_fields_are_read_under_both_names() -> None:
    seen: list[Any] = []

    class Peek(MCPBaseTool):
        def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
            seen.extend((content[0].resource.uri, content[0].resource.mime_type, content[0].text))
            return json.dumps(content[0].model_dump()), {}

    resource = {"type": "resource", "resource": {"uri": "u:1", "mimeType": "text/plain", "text": "t"}}
    result = parsed(Peek({}), [resource], to_result({"content": [resource]}))
    assert seen == ["u:1", "text/plain", None]
    assert json.loads(result.text) == resource


def test_the_hook_needs_no_mcp_package() -> None:
    code = "import sys, gateway.upstream.hook; sys.exit('mcp' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0

"""Decoding of raw tool results, and users' result parsers."""

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

from gateway.mcp_client.decode import to_result
from gateway.mcp_client.parse_hook import MCPBaseTool, apply_parser
from gateway.types import Audio, Image, Outcome, Resource, Text, ToolResult
from tests.mcp_client.mcp_toolsets import call_tool, misbehaving_toolset

PIXEL_BASE64 = base64.b64encode(b"pixel").decode()
IMAGE = {"type": "image", "data": PIXEL_BASE64, "mimeType": "image/jpeg"}


def text_content(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_content_types_and_order_are_kept() -> None:
    content = [
        text_content("a"),
        IMAGE,
        {"type": "audio", "data": PIXEL_BASE64, "mimeType": "audio/mpeg"},
        {"type": "resource", "resource": {"uri": "u:1", "mimeType": "text/plain", "text": "t"}},
        {"type": "resource", "resource": {"uri": "u:2", "mimeType": "image/png", "blob": PIXEL_BASE64}},
        {"type": "resource", "resource": {"uri": "u:3", "mimeType": "application/pdf", "blob": PIXEL_BASE64}},
        {"type": "resource_link", "uri": "u:4", "name": "n", "description": "d", "mimeType": "text/html"},
        text_content("b"),
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


def test_structured_content_becomes_text_only_if_there_is_none() -> None:
    structured = {"größe": 3}
    both = to_result({"content": [text_content("three")], "structuredContent": structured})
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
def test_unreadable_part_becomes_a_note_and_is_counted(item: Any) -> None:
    result = to_result({"content": [text_content("before"), item, text_content("after")]})
    assert result.outcome is Outcome.OK
    assert result.parts[0] == Text("before") and result.parts[2] == Text("after")
    assert isinstance(result.parts[1], Text) and "cannot be shown" in result.parts[1].text
    assert result.metrics["unreadable_parts"] == 1


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(["type", "text"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["content", "structuredContent", "isError", "_meta", "resultType"]), any_json))
def test_any_raw_result_is_decoded(raw: dict[str, Any]) -> None:
    assert isinstance(to_result(raw), ToolResult)


def test_meta_of_another_gateway_is_decoded() -> None:
    meta = {"mtrl/reward": 0.5, "mtrl/done": True, "mtrl/metrics": {"hits": 3}, "mtrl/outcome": "timeout", "own": 1}
    result = to_result({"content": [], "isError": True, "_meta": meta})
    assert (result.reward, result.done, result.metrics, result.outcome) == (0.5, True, {"hits": 3}, Outcome.TIMEOUT)
    assert result.meta == {"own": 1}
    strange = {"mtrl/reward": "much", "mtrl/done": 1, "mtrl/metrics": [], "mtrl/outcome": "great"}
    plain = to_result({"content": [], "_meta": strange})
    assert (plain.reward, plain.done, plain.metrics, plain.outcome) == (None, False, {}, Outcome.OK)


class UppercaseParser(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        text = " ".join(item.text.upper() for item in content if item.type == "text")
        kinds = {item.mimeType for item in content} | {item.mime_type for item in content}
        return text, {"kinds": sorted(kind for kind in kinds if kind), "named": self.tool_schema.function.name}


class RewardParser(MCPBaseTool):
    def parse_result(self, result: ToolResult) -> ToolResult:
        return replace(result, reward=float(len(result.parts)), done=True)


class RaisingParser(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        raise KeyError("answer")


async def test_parse_tool_result_replaces_the_text_and_keeps_other_parts() -> None:
    async with misbehaving_toolset("stdio", parse={"mixed": UppercaseParser}) as server:
        result = await call_tool(server, "mixed")
        assert [type(part) for part in result.parts] == [Text, Image, Audio, Resource, Resource]
        assert result.text == "BEFORE AFTER"
        assert result.metrics["kinds"] == ["audio/wav", "image/png", "text/plain"]
        assert result.metrics["named"] == "mixed"
        assert (await call_tool(server, "echo", text="quiet")).text == "quiet"


async def test_parser_for_all_tools_gets_the_whole_result() -> None:
    async with misbehaving_toolset("stdio", parse={"*": RewardParser({}), "echo": MCPBaseTool}) as server:
        result = await call_tool(server, "mixed")
        assert (result.reward, result.done) == (6.0, True)
        assert (await call_tool(server, "echo", text="x")).reward is None


async def test_raising_parser_does_not_fail_the_call() -> None:
    async with misbehaving_toolset("stdio", parse={"*": RaisingParser}) as server:
        result = await call_tool(server, "echo", text="still here")
        assert (result.outcome, result.text) == (Outcome.OK, "still here")
        assert result.metrics["parse_failed"] == 1 and "RaisingParser" in (result.reason or "")


def test_nested_content_fields_have_both_names() -> None:
    values: list[Any] = []

    class RecordingParser(MCPBaseTool):
        def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
            values.extend((content[0].resource.uri, content[0].resource.mime_type, content[0].text))
            return json.dumps(content[0].model_dump()), {}

    resource = {"type": "resource", "resource": {"uri": "u:1", "mimeType": "text/plain", "text": "t"}}
    result = apply_parser(RecordingParser({}), [resource], to_result({"content": [resource]}))
    assert values == ["u:1", "text/plain", None]
    assert json.loads(result.text) == resource


def test_parse_hook_imports_no_mcp_package() -> None:
    code = "import sys, gateway.mcp_client.parse_hook; sys.exit('mcp' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

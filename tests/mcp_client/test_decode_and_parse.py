"""Decoding of raw tool results, and users' result parsers."""

from __future__ import annotations

import base64
from dataclasses import replace
from threading import Event, get_ident
from typing import Any

import pytest

from gateway.mcp_client import mcp_session
from gateway.mcp_client.decode import to_result
from gateway.mcp_client.parse_hook import MCPBaseTool
from gateway.types import Audio, Image, Outcome, Resource, Text, ToolResult
from tests.mcp_client.mcp_toolsets import call_tool, misbehaving_toolset
from tests.waiting import PATIENCE_S

PIXEL_BASE64 = base64.b64encode(b"pixel").decode()
IMAGE = {"type": "image", "data": PIXEL_BASE64, "mimeType": "image/jpeg"}


def text_content(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_picture_in_a_resource_is_an_image() -> None:
    resource = {"uri": "u:2", "mimeType": "image/png", "blob": PIXEL_BASE64}
    assert to_result({"content": [{"type": "resource", "resource": resource}]}).parts == (Image(b"pixel", "image/png"),)


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
        {"type": "text", "text": 3},
        {},
        None,
    ],
)
def test_unreadable_part_becomes_a_note_and_is_counted(item: Any) -> None:
    result = to_result({"content": [text_content("before"), item, text_content("after")]})
    assert result.outcome is Outcome.OK
    assert result.parts[0] == Text("before") and result.parts[2] == Text("after")
    assert isinstance(result.parts[1], Text) and "cannot be shown" in result.parts[1].text
    assert result.metrics["unreadable_parts"] == 1


def test_fields_of_wrong_types_are_ignored() -> None:
    meta = {"mtrl/metrics": 3, "mtrl/reward": "x", "mtrl/done": 1, "mtrl/outcome": [], "mtrl/reason": 3}
    for raw in ({"content": "x", "_meta": 3, "isError": "no"}, {"content": {}, "_meta": meta}, {"_meta": meta}):
        result = to_result(raw)
        assert (result.outcome, result.reward, result.done, result.reason) == (Outcome.OK, None, False, None)


class UppercaseParser(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        text = " ".join(item.text.upper() for item in content if item.type == "text")
        kinds = {item.mimeType for item in content} | {item.mime_type for item in content}
        named = self.tool_schema.function.name
        return text, {"kinds": sorted(kind for kind in kinds if kind), "named": named, "thread": get_ident()}


class RewardingParser(MCPBaseTool):
    def parse_result(self, result: ToolResult) -> ToolResult:
        return replace(result, reward=float(len(result.parts)), done=True)


class WaitingParser(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        if content[0].text == "wait":
            ENDED.wait(PATIENCE_S)
        raise KeyError("answer")


ENDED = Event()


async def test_parser_that_raises_or_hangs_leaves_the_result_and_one_of_all_tools_may_score_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_session, "PARSE_TIMEOUT_S", 0.3)
    async with misbehaving_toolset("stdio", parse={"*": RewardingParser({}), "echo": WaitingParser}) as server:
        scored = await call_tool(server, "mixed")
        assert (scored.reward, scored.done) == (6.0, True)
        for text in ("raise", "wait"):
            result = await call_tool(server, "echo", text=text)
            assert (result.outcome, result.text, result.metrics["parse_failed"]) == (Outcome.OK, text, 1)
            assert "WaitingParser" in (result.reason or "")
    ENDED.set()


async def test_parse_tool_result_replaces_the_text_and_keeps_other_parts() -> None:
    async with misbehaving_toolset("stdio", parse={"mixed": UppercaseParser}) as server:
        result = await call_tool(server, "mixed")
        assert [type(part) for part in result.parts] == [Text, Image, Audio, Resource, Resource]
        assert result.text == "BEFORE AFTER"
        assert result.metrics["kinds"] == ["audio/wav", "image/png", "text/plain"]
        assert result.metrics["named"] == "mixed" and result.metrics["thread"] != get_ident()
        assert (await call_tool(server, "echo", text="quiet")).text == "quiet"

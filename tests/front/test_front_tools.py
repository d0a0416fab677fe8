"""A client of the front sees tools as they are, and results as they were."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client
from mcp_types import methods

from gateway.front.page import PAGE, page
from gateway.front.parts import to_answer, to_block, to_tool
from gateway.gateway import Gateway
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.toolset import ClassTool, NativeToolset
from gateway.table import Source
from gateway.types import Audio, Hints, Image, Outcome, Part, Resource, Text, ToolResult, ToolSpec, Video
from gateway.upstream.parts import to_result
from tests.doors.kit import JUDGE, PNG, SEVERAL, Judge, facts, several
from tests.doors.kit import sources as kit
from tests.front.kit import ERAS, WITHIN_S, connected, fronted, native, words

era = pytest.mark.parametrize("era", ERAS)
RICH: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"name": {"type": "string", "minLength": 1}},
    "properties": {"name": {"$ref": "#/$defs/name"}, "other": {"anyOf": [{"type": "null"}, {"type": "integer"}]}},
    "required": ["name"],
    "additionalProperties": False,
    "allOf": [{"not": {"required": ["other"]}}],
}


def rich(**arguments: Any) -> str:
    """Takes anything."""
    return str(arguments)


@era
async def test_a_schema_arrives_as_its_owner_wrote_it(era: str) -> None:
    tool = FunctionTool(rich, name="rich", parameters=RICH, owner="here")
    async with fronted(era, Source("native", NativeToolset([tool]))) as (client, _):
        (listed,) = (await client.list_tools()).tools
        assert listed.input_schema == RICH


@era
async def test_tools_meant_for_the_loop_are_neither_listed_nor_called(era: str) -> None:
    async with fronted(era, *kit()) as (client, _):
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["add", "several", "facts", "fails", "remember", "judge", "pure_add"]
        with pytest.raises(MCPError, match="Unknown tool: feedback_gsm8k") as refused:
            await client.call_tool("feedback_gsm8k", {})
        assert refused.value.code == types.INVALID_PARAMS


@era
async def test_every_kind_of_part_arrives_in_its_order(era: str) -> None:
    async with fronted(era, native(several)) as (client, _):
        content = (await client.call_tool("several", {})).content
    assert [block.type for block in content] == [
        *("text", "image", "text", "audio"),
        *("resource", "resource", "resource_link", "text"),
    ]
    raw = {"content": [block.model_dump(mode="json", by_alias=True) for block in content]}
    assert to_result(raw).parts == SEVERAL


@era
async def test_structure_reward_and_metrics_arrive(era: str) -> None:
    async with fronted(era, native(facts)) as (client, _):
        result = await client.call_tool("facts", {})
    assert result.structured_content == {"deep": [1, None, {"ä": 2.5}]} and not result.is_error
    said = {key: value for key, value in (result.meta or {}).items() if not key.startswith("io.")}
    assert said == {
        "mtrl/outcome": "ok",
        "mtrl/reason": "because",
        "mtrl/reward": 0.5,
        "mtrl/done": True,
        "mtrl/metrics": {"tokens": 7},
        "trace": "kept",
    }


@era
async def test_a_mistake_is_an_error_that_says_how_to_mend_it(era: str) -> None:
    async with fronted(era, *kit()) as (client, _):
        wrong = await client.call_tool("add", {"a": "one"})
        assert wrong.is_error and (wrong.meta or {})["mtrl/outcome"] == "invalid"
        assert "Expected: {a: integer, b: integer (optional)}" in words(wrong)
        failed = await client.call_tool("fails", {})
        assert failed.is_error and "no such luck" in words(failed)


@era
async def test_progress_of_a_native_tool_arrives(era: str) -> None:
    async def count(session: SessionContext) -> str:
        """Counts to two."""
        for place in (1, 2):
            await session.call.progress(place, 2, f"{place} of 2")  # type: ignore[misc]
        return "counted"

    heard: list[tuple[float, float | None, str | None]] = []

    async def hear(done: float, total: float | None, message: str | None) -> None:
        heard.append((done, total, message))

    async with fronted(era, native(count)) as (client, _):
        assert words(await client.call_tool("count", {}, progress_callback=hear)) == "counted"
    assert heard == [(1, 2, "1 of 2"), (2, 2, "2 of 2")]


@era
async def test_a_call_that_its_client_gives_up_is_ended(era: str) -> None:
    began, ended = anyio.Event(), anyio.Event()

    async def hang() -> None:
        """Never answers."""
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with fronted(era, native(hang)) as (client, _), anyio.create_task_group() as tasks:
        tasks.start_soon(client.call_tool, "hang", {})
        await began.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await ended.wait()
    assert ended.is_set()


@era
async def test_one_client_keeps_its_state(era: str) -> None:
    async with fronted(era, *kit()) as (client, gateway):
        await client.call_tool("remember", {"word": "a"})
        assert words(await client.call_tool("remember", {"word": "b"})) == '["a", "b"]'
        assert len(gateway.sessions) == 1


@era
async def test_a_client_that_leaves_gives_everything_back(era: str) -> None:
    judge = Judge({}, OpenAIFunctionToolSchema.model_validate(JUDGE))
    source = Source("judge", NativeToolset([ClassTool(judge, owner="here")]))
    with anyio.fail_after(WITHIN_S):
        async with Gateway([source]) as gateway:
            async with connected(era, gateway) as client:
                await client.call_tool("judge", {"word": "good"})
                assert judge.released == [] and len(gateway.sessions) == 1
            assert len(judge.released) == 1 and not gateway.sessions


class Demanding(BaseTool):
    """Cannot be created without what no MCP client gives."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        raise ValueError("no ground truth")


@era
async def test_a_tool_that_cannot_be_opened_hides_no_other(era: str) -> None:
    demanding = ClassTool(Demanding({}, OpenAIFunctionToolSchema.model_validate(JUDGE)), owner="here")
    source = Source("mixed", NativeToolset([demanding, FunctionTool(facts, owner="here")]))
    async with fronted(era, source) as (client, _):
        assert words(await client.call_tool("facts", {})) == "facts"
        with pytest.raises(MCPError, match="no ground truth"):
            await client.call_tool("judge", {"word": "x"})


@era
async def test_a_client_is_told_when_tools_change_and_can_call_the_new_ones(era: str) -> None:
    async def news(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            told.set()

    told = anyio.Event()
    first = native(facts, key="first")
    async with fronted(era, first, message_handler=news) as (client, gateway), anyio.create_task_group() as tasks:
        await client.call_tool("facts", {})
        if era == "2026":
            await tasks.start(_listen, client, told)
        await gateway.reload([first, native(several, key="second")])
        await told.wait()
        assert [tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools] == ["facts", "several"]
        assert len((await client.call_tool("several", {})).content) == len(SEVERAL)
        tasks.cancel_scope.cancel()


async def _listen(client: Client, told: anyio.Event, *, task_status: Any) -> None:
    async with client.listen(tools_list_changed=True) as changes:
        task_status.started()
        async for _ in changes:
            told.set()


@era
async def test_what_no_server_has_is_no_method_and_no_promise(era: str) -> None:
    async with fronted(era, native(facts)) as (client, _):
        abilities = client.server_capabilities
        assert abilities.tools and not (abilities.prompts or abilities.resources or abilities.completions)
        with pytest.raises(MCPError) as refused:
            await client.list_prompts()
        assert refused.value.code == types.METHOD_NOT_FOUND


async def test_a_long_list_comes_in_pages() -> None:
    items = [{"name": f"tool_{place}", "inputSchema": {"type": "object"}} for place in range(2 * PAGE + 1)]
    read: list[Any] = []
    cursor = None
    for expected in (PAGE, PAGE, 1):
        answer = page("tools/list", "2025-11-25", "tools", items, cursor)
        assert len(answer["tools"]) == expected
        read, cursor = read + answer["tools"], answer.get("nextCursor")
    assert read == items and cursor is None
    with pytest.raises(MCPError, match="Unknown cursor"):
        page("tools/list", "2025-11-25", "tools", items, "../etc")


async def test_what_an_older_wire_cannot_carry_hides_nothing_else() -> None:
    items = [
        {"name": "sound", "inputSchema": {"type": "object"}},
        {"name": "odd", "inputSchema": {"type": "object", "required": "all"}},
    ]
    assert [tool["name"] for tool in page("tools/list", "2025-11-25", "tools", items, None)["tools"]] == ["sound"]


SPECS = [
    ToolSpec("bare", parameters={"properties": {"a": {"type": "string"}}}),
    ToolSpec("listy", "answers with a list", output={"type": "array", "items": {"type": "string"}}),
    ToolSpec("hinted", hints=Hints("Hinted", True, True, False, True), output={"type": "object"}),
]


@pytest.mark.parametrize("version", ["2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_whatever_is_offered_fits_every_wire(version: str) -> None:
    tools = [to_tool(spec, modern=version >= "2026") for spec in SPECS]
    answer = page("tools/list", version, "tools", tools, None)
    assert [tool["name"] for tool in answer["tools"]] == ["bare", "listy", "hinted"]
    assert tools[0]["inputSchema"]["type"] == "object"
    assert ("outputSchema" in tools[1]) == (version >= "2026")
    result = ToolResult((Text("x"),), Outcome.TIMEOUT, structured=[1], metrics={"odd": PNG})
    sent = methods.serialize_server_result("tools/call", version, to_answer(result, modern=version >= "2026"))
    assert sent["isError"] and ("structuredContent" in sent) == (version >= "2026")


PARTS: list[Part] = [
    Text("text"),
    Image(PNG, "image/png"),
    Audio(b"RIFF", "audio/wav"),
    Video(b"film", "video/mp4"),
    Resource("a://b", "text/plain", text="words", name="n", description="d"),
    Resource("a://b", "application/zip", data=b"\0", name="n"),
    Resource("a://b", name="n", description="d"),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_gateway_behind_a_gateway_reads_the_same_part(part: Part) -> None:
    assert to_result({"content": [to_block(part)]}).parts == (part,)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_gateway_behind_a_gateway_reads_the_same_outcome(outcome: Outcome) -> None:
    result = ToolResult((Text("x"),), outcome, reward=0.5, done=True, metrics={"n": 1}, reason="why", meta={"a": 1})
    read = to_result(to_answer(result, modern=True))
    assert (read.outcome, read.reward, read.done, read.metrics, read.reason) == (outcome, 0.5, True, {"n": 1}, "why")
    assert to_answer(read, modern=True) == to_answer(result, modern=True)

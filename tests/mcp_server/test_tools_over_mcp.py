"""Tools and results over the gateway's MCP server arrive unchanged."""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client
from mcp_types import methods

from gateway.gateway import Gateway
from gateway.mcp_server.encode import to_call_result, to_tool
from gateway.mcp_server.server import PAGE_SIZE, build_page
from gateway.native.base import OpenAIFunctionToolSchema
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.tool_table import Source
from gateway.types import Hints, Outcome, Text, ToolResult, ToolSpec
from tests.mcp_server.clients import TIMEOUT_S, connect_client, connect_to_gateway, each_protocol, native_source
from tests.toolset_conformance.sample_tools import ALL_PARTS, JUDGE_SCHEMA, PNG, Judge, facts, several
from tests.toolset_conformance.sample_tools import sample_sources as kit


@each_protocol
async def test_loop_tools_are_neither_listed_nor_callable(protocol: str) -> None:
    async with connect_to_gateway(protocol, *kit()) as (client, _):
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["add", "several", "facts", "fails", "remember", "judge", "pure_add"]
        with pytest.raises(MCPError, match="Unknown tool: feedback_gsm8k") as error_info:
            await client.call_tool("feedback_gsm8k", {})
        assert error_info.value.code == types.INVALID_PARAMS
        can = client.server_capabilities
        assert can.tools and not (can.prompts or can.resources or can.completions)


@each_protocol
async def test_disconnect_of_the_client_releases_its_session(protocol: str) -> None:
    judge = Judge({}, OpenAIFunctionToolSchema.model_validate(JUDGE_SCHEMA))
    source = Source("judge", NativeToolset([ClassTool(judge, owner="here")]))
    with anyio.fail_after(TIMEOUT_S):
        async with Gateway([source]) as gateway:
            async with connect_client(protocol, gateway) as client:
                await client.call_tool("judge", {"word": "good"})
                assert judge.released == [] and len(gateway.sessions) == 1
            assert len(judge.released) == 1 and not gateway.sessions


@each_protocol
async def test_client_is_notified_of_new_tools_and_can_call_them(protocol: str) -> None:
    async def on_message(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed.set()

    changed = anyio.Event()
    first_source = native_source(facts, key="first")
    async with (
        connect_to_gateway(protocol, first_source, message_handler=on_message) as (client, gateway),
        anyio.create_task_group() as tasks,
    ):
        await client.call_tool("facts", {})
        if protocol == "2026":
            await tasks.start(_listen, client, changed)
        await gateway.reload([first_source, native_source(several, key="second")])
        await changed.wait()
        assert [tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools] == ["facts", "several"]
        assert len((await client.call_tool("several", {})).content) == len(ALL_PARTS)
        tasks.cancel_scope.cancel()


async def _listen(client: Client, changed: anyio.Event, *, task_status: Any) -> None:
    async with client.listen(tools_list_changed=True) as changes:
        task_status.started()
        async for _ in changes:
            changed.set()


async def test_long_list_is_paged() -> None:
    items = [{"name": f"tool_{number}", "inputSchema": {"type": "object"}} for number in range(2 * PAGE_SIZE + 1)]
    pages: list[Any] = []
    cursor = None
    for expected in (PAGE_SIZE, PAGE_SIZE, 1):
        answer = build_page("tools/list", "2025-11-25", "tools", items, cursor)
        assert len(answer["tools"]) == expected
        pages, cursor = pages + answer["tools"], answer.get("nextCursor")
    assert pages == items and cursor is None
    with pytest.raises(MCPError, match="Unknown cursor"):
        build_page("tools/list", "2025-11-25", "tools", items, "../etc")


async def test_tool_that_the_version_cannot_express_is_left_out() -> None:
    items = [
        {"name": "sound", "inputSchema": {"type": "object"}},
        {"name": "odd", "inputSchema": {"type": "object", "required": "all"}},
    ]
    assert [tool["name"] for tool in build_page("tools/list", "2025-11-25", "tools", items, None)["tools"]] == ["sound"]


SPECS = [
    ToolSpec("bare", parameters={"properties": {"a": {"type": "string"}}}),
    ToolSpec("listy", "answers with a list", output={"type": "array", "items": {"type": "string"}}),
    ToolSpec("hinted", hints=Hints("Hinted", True, True, False, True), output={"type": "object"}),
]


@pytest.mark.parametrize("version", ["2024-11-05", "2025-06-18", "2025-11-25", "2026-07-28"])
async def test_tools_and_results_fit_every_protocol_version(version: str) -> None:
    tools = [to_tool(spec, modern=version >= "2026") for spec in SPECS]
    answer = build_page("tools/list", version, "tools", tools, None)
    assert [tool["name"] for tool in answer["tools"]] == ["bare", "listy", "hinted"]
    assert tools[0]["inputSchema"]["type"] == "object"
    assert ("outputSchema" in tools[1]) == (version >= "2026")
    result = ToolResult((Text("x"),), Outcome.TIMEOUT, structured=[1], metrics={"odd": PNG})
    serialized = methods.serialize_server_result(
        "tools/call", version, to_call_result(result, modern=version >= "2026")
    )
    assert serialized["isError"] and ("structuredContent" in serialized) == (version >= "2026")

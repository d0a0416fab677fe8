"""The server of the conformance run works over stdio, in old and modern versions; the suite itself tests HTTP."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters

EVERYTHING_SERVER = StdioServerParameters(
    command=sys.executable, args=[str(Path(__file__).with_name("everything_server.py"))]
)
all_versions = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


async def on_elicitation(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": "Ada", "username": "ada", "email": "ada@example.org"})


@asynccontextmanager
async def connect_client(mode: str) -> AsyncIterator[Client]:
    with anyio.fail_after(60):
        async with Client(EVERYTHING_SERVER, mode=mode, elicitation_callback=on_elicitation) as client:
            yield client


def text_of(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


@all_versions
async def test_server_lists_tools_resources_and_prompts(mode: str) -> None:
    async with connect_client(mode) as client:
        assert "json_schema_2020_12_tool" in {tool.name for tool in (await client.list_tools()).tools}
        assert len((await client.list_resources()).resources) == 3
        assert len((await client.list_prompts()).prompts) == 5
        resource = await client.read_resource("test://template/7/data")
        assert [getattr(content, "text", None) for content in resource.contents] == ['{"id": "7"}']


@all_versions
async def test_results_have_several_content_types(mode: str) -> None:
    async with connect_client(mode) as client:
        result = await client.call_tool("test_multiple_content_types", {})
        assert [part.type for part in result.content] == ["text", "image", "resource"]
        assert (await client.call_tool("test_error_handling", {})).is_error


async def test_elicitation_works_in_both_protocol_versions() -> None:
    async with connect_client("legacy") as client:
        assert "accept" in text_of(await client.call_tool("test_elicitation", {"message": "Who?"}))
    async with connect_client("2026-07-28") as client:
        assert text_of(await client.call_tool("test_input_required_result_elicitation", {})) == "Hello, Ada!"

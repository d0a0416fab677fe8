"""The upstream of the conformance run offers its one of everything over stdio, in both eras; the suite proves HTTP."""

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

UPSTREAM = StdioServerParameters(command=sys.executable, args=[str(Path(__file__).with_name("upstream.py"))])
eras = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


async def elicited(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"name": "Ada", "username": "ada", "email": "ada@example.org"})


@asynccontextmanager
async def connected(mode: str) -> AsyncIterator[Client]:
    with anyio.fail_after(30):
        async with Client(UPSTREAM, mode=mode, elicitation_callback=elicited) as client:
            yield client


def said(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


@eras
async def test_it_lists_tools_resources_and_prompts_over_stdio(mode: str) -> None:
    async with connected(mode) as client:
        assert "json_schema_2020_12_tool" in {tool.name for tool in (await client.list_tools()).tools}
        assert len((await client.list_resources()).resources) == 3
        assert len((await client.list_prompts()).prompts) == 5
        read = await client.read_resource("test://template/7/data")
        assert [getattr(content, "text", None) for content in read.contents] == ['{"id": "7"}']


@eras
async def test_its_results_have_every_kind_of_part(mode: str) -> None:
    async with connected(mode) as client:
        mixed = await client.call_tool("test_multiple_content_types", {})
        assert [part.type for part in mixed.content] == ["text", "image", "resource"]
        assert (await client.call_tool("test_error_handling", {})).is_error


async def test_it_asks_the_user_in_the_way_of_each_era() -> None:
    async with connected("legacy") as client:
        assert "accept" in said(await client.call_tool("test_elicitation", {"message": "Who?"}))
    async with connected("2026-07-28") as client:
        assert said(await client.call_tool("test_input_required_result_elicitation", {})) == "Hello, Ada!"

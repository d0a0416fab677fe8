"""A FastMCP 4 server speaks both MCP eras, but asks and announces in the older one only, which is therefore used."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_types import CLIENT_CAPABILITIES_META_KEY

from gateway.gateway import Gateway
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Context, Outcome, ToolCall, ToolResult
from tests.servers.start_server import free_port, kill_process_group
from tests.third_party.peers import ASKING_SERVER, FASTMCP_PYTHON, write_servers
from tests.waiting import wait_until

WITHIN_S = 90.0
TRANSPORTS = ("stdio", "http")


@asynccontextmanager
async def serve_asking(transport: str) -> AsyncIterator[dict[str, Any]]:
    """The entry of a servers file for the asking server, which is started if it is one over HTTP."""
    if transport == "stdio":
        yield {"command": FASTMCP_PYTHON, "args": [ASKING_SERVER, "stdio"], "connect_timeout_s": WITHIN_S}
        return
    port = free_port()
    command = [FASTMCP_PYTHON, ASKING_SERVER, "http", str(port)]
    process = await anyio.open_process(command, stdin=None, stdout=None, stderr=None, start_new_session=True)
    try:
        yield {"url": f"http://127.0.0.1:{port}/mcp", "transport": "http"}
    finally:
        await kill_process_group(process)


@asynccontextmanager
async def open_asking(folder: Path, transport: str, **settings: Any) -> AsyncIterator[Gateway]:
    with anyio.fail_after(2 * WITHIN_S):
        async with serve_asking(transport) as entry:
            tools = folder / "tools.yaml"
            tools.write_text(json.dumps({"tools": [{"server": "asking", "timeout_s": WITHIN_S}]}))
            async with Gateway.load(tools, write_servers(folder, asking=entry | settings)) as gateway:
                await wait_until(lambda: bool(gateway.specs), WITHIN_S)
                yield gateway


async def answer(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"action": "accept", "content": {"value": "Ada"}}


async def use_tool(gateway: Gateway, name: str) -> ToolResult:
    """Calls a tool as a client that can be asked."""
    caller = Context(answer_request=answer, meta={CLIENT_CAPABILITIES_META_KEY: {"elicitation": {}}})
    async with gateway.open() as session:
        return await session.call(ToolCall("1", name, "{}"), caller)


def protocol_of(gateway: Gateway) -> str:
    backend = gateway.sources[0].backend
    assert isinstance(backend, McpToolset)
    return backend.status.protocol_version


def has_found(gateway: Gateway, name: str = "found") -> bool:
    return any(spec.name == name for spec in gateway.specs)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_server_asks_and_announces_its_tools_without_a_setting(tmp_path: Path, transport: str) -> None:
    async with open_asking(tmp_path, transport) as gateway:
        assert protocol_of(gateway) == "2025-11-25"
        asked = await use_tool(gateway, "ask")
        assert (asked.outcome, asked.text) == (Outcome.OK, "accept Ada")
        for name in ("found", "found_apart"):
            assert not has_found(gateway, name)
            await use_tool(gateway, name.replace("found", "add"))
            await wait_until(lambda name=name: has_found(gateway, name), WITHIN_S)


async def test_pinned_to_2026_the_server_refuses_to_ask_at_once(tmp_path: Path) -> None:
    async with open_asking(tmp_path, "stdio", protocol="2026-07-28") as gateway:
        assert protocol_of(gateway) == "2026-07-28"
        asked = await use_tool(gateway, "ask")
        assert asked.outcome is Outcome.ERROR and "2026-07-28" in asked.text

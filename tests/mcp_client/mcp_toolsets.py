"""MCP toolsets for tests: the misbehaving server over any transport."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from gateway.config.models import Server
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolCall, ToolResult
from tests.servers.start_server import serve_misbehaving, stdio_command

TRANSPORTS = ("stdio", "sse", "http")
TRANSPORT_NAMES = {"stdio": "stdio", "sse": "sse", "http": "streamable-http"}


@asynccontextmanager
async def open_toolset(config: Server, **options: Any) -> AsyncIterator[McpToolset]:
    async with Services() as services, McpToolset("it", config, services=services, **options) as server:
        yield server


@asynccontextmanager
async def misbehaving_toolset(
    transport: str, *flags: str, parse: Any = None, within_s: float | None = 60, **config: Any
) -> AsyncIterator[McpToolset]:
    """The misbehaving server as a toolset, over one transport."""
    with anyio.fail_after(within_s):
        if transport == "stdio":
            command, args = stdio_command(*flags)
            async with open_toolset(Server(command=command, args=tuple(args), **config), parse=parse) as server:
                yield server
            return
        async with (
            serve_misbehaving("sse" if transport == "sse" else "http", *flags) as url,
            open_toolset(Server(url=url, transport=TRANSPORT_NAMES[transport], **config), parse=parse) as server,
        ):
            yield server


async def call_tool(server: McpToolset, name: str, context: Context = DEFAULT_CONTEXT, **arguments: Any) -> ToolResult:
    async with server.open(Task()) as session:
        return await session.call(ToolCall("1", name, json.dumps(arguments)), context)

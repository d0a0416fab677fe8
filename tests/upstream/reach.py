"""One server, reached over any transport, as the toolset that it becomes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from gateway.config.models import Server
from gateway.types import ALONE, Context, Task, ToolCall, ToolResult
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.servers.start import serving, stdio_command

TRANSPORTS = ("stdio", "sse", "http")
WAYS = {"stdio": "stdio", "sse": "sse", "http": "streamable-http"}


@asynccontextmanager
async def toolset(config: Server, **more: Any) -> AsyncIterator[McpToolset]:
    async with Services() as services, McpToolset("it", config, services=services, **more) as server:
        yield server


@asynccontextmanager
async def reached(transport: str, *flags: str, parse: Any = None, **config: Any) -> AsyncIterator[McpToolset]:
    """The misbehaving server over that transport; leaves nothing running."""
    with anyio.fail_after(60):
        if transport == "stdio":
            command, args = stdio_command(*flags)
            async with toolset(Server(command=command, args=tuple(args), **config), parse=parse) as server:
                yield server
            return
        async with (
            serving("sse" if transport == "sse" else "http", *flags) as url,
            toolset(Server(url=url, transport=WAYS[transport], **config), parse=parse) as server,
        ):
            yield server


async def call(server: McpToolset, name: str, context: Context = ALONE, **arguments: Any) -> ToolResult:
    async with server.open(Task()) as session:
        return await session.call(ToolCall("1", name, json.dumps(arguments)), context)


async def eventually(true: Callable[[], bool], within_s: float = 15.0) -> None:
    """Another process tells nobody when it is done, so it is looked at again and again, for a bounded while."""
    with anyio.fail_after(within_s):
        while not true():  # noqa: ASYNC110 (it has no event)
            await anyio.sleep(0.02)

"""MCP clients of a gateway's MCP server, for tests: in process or over HTTP, with old and modern protocol versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client._memory import InMemoryTransport

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.mcp_server.server import GatewayMcpServer
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from tests.live_server import live_server_async
from tests.servers.forked_server import forked_command

ELICITING_SERVER = Path(__file__).with_name("eliciting_server.py")
CLIENT_MODES = {"2025": "legacy", "2026": "auto"}
each_protocol = pytest.mark.parametrize("protocol", CLIENT_MODES)
protocol_pairs = pytest.mark.parametrize(
    ("upstream", "protocol"), [("2025", "2025"), ("2025", "2026"), ("2026", "2025"), ("2026", "2026")]
)
"""The protocols of a server and of a client."""
crossed_protocols = pytest.mark.parametrize(("upstream", "protocol"), [("2025", "2026"), ("2026", "2025")])
"""For what passes through each side by itself."""
TIMEOUT_S = 120


def native_source(*functions: Any, key: str = "native") -> Source:
    toolset = NativeToolset([FunctionTool(function, owner=key) for function in functions])
    return Source(key, LimitedToolset(toolset, Limits()))


def connect_client(protocol: str, gateway: Gateway, **options: Any) -> Client:
    """A client in this process; messages are still serialized."""
    return Client(
        InMemoryTransport(GatewayMcpServer(gateway, single_client=True)), mode=CLIENT_MODES[protocol], **options
    )


@asynccontextmanager
async def connect_to_gateway(protocol: str, *sources: Source, **options: Any) -> AsyncIterator[tuple[Client, Gateway]]:
    """A client in this process, and its gateway."""
    with anyio.fail_after(TIMEOUT_S):
        async with Gateway(sources) as gateway, connect_client(protocol, gateway, **options) as client:
            yield client, gateway


@asynccontextmanager
async def serve_gateway(make_sources: Callable[[], Sequence[Source]]) -> AsyncIterator[tuple[str, Gateway]]:
    """A gateway over HTTP, for any number of clients; yields its MCP URL."""
    with anyio.fail_after(TIMEOUT_S):
        async with live_server_async(lambda: Gateway(make_sources())) as server:
            yield f"{server.url}/mcp", server.gateway


@asynccontextmanager
async def connect_to_eliciting_server(
    protocol: str, upstream: str, **options: Any
) -> AsyncIterator[tuple[Client, Gateway]]:
    """A client of a gateway with the eliciting server of an upstream protocol."""
    services = Services()
    sources = [eliciting_source(upstream, services)]
    with anyio.fail_after(TIMEOUT_S):
        async with (
            Gateway(sources, services=services) as gateway,
            connect_client(protocol, gateway, **options) as client,
        ):
            yield client, gateway


def eliciting_source(upstream: str, services: Services, **options: Any) -> Source:
    """The eliciting server as a source; the options are those of a servers file."""
    command, args = forked_command(ELICITING_SERVER, *(["--handshake-only"] if upstream == "2025" else []))
    toolset = McpToolset("asker", Server(command=command, args=tuple(args), **options), services=services)
    limited = LimitedToolset(toolset, Limits(retries=0))
    return Source("asker", limited, toolset, trusted=False, answers=toolset.answers)


def text_of(result: Any) -> str:
    """The text of a result."""
    return "\n".join(block.text for block in result.content if block.type == "text")

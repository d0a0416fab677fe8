"""The kinds of gateways: in process, over HTTP, behind another gateway, over MCP, while recorded.

A test with the fixture `open_gateway` runs for each of them.

A further door is one more entry of `DOORS`: it takes the sources' maker, and yields something to open sessions on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.client import RemoteGateway
from gateway.config.models import Server
from gateway.gateway import Gateway
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.session import AnyGateway
from gateway.tape import record_gateway
from gateway.tool_table import Source
from tests.live_server import live_server_async

MakeSources = Callable[[], Sequence[Source]]
OpenGateway = Callable[[MakeSources], AbstractAsyncContextManager[AnyGateway]]


@asynccontextmanager
async def in_process(make: MakeSources) -> AsyncIterator[AnyGateway]:
    async with Gateway(make()) as gateway:
        yield gateway


@asynccontextmanager
async def over_http(make: MakeSources) -> AsyncIterator[AnyGateway]:
    async with live_server_async(lambda: Gateway(make())) as server, RemoteGateway(server.url) as gateway:
        yield gateway


@asynccontextmanager
async def behind_another_gateway(make: MakeSources) -> AsyncIterator[AnyGateway]:
    """A gateway whose only source is a remote gateway."""
    async with (
        live_server_async(lambda: Gateway(make())) as server,
        Gateway([Source("remote", RemoteGateway(server.url))]) as gateway,
    ):
        yield gateway


@asynccontextmanager
async def over_mcp(make: MakeSources) -> AsyncIterator[AnyGateway]:
    """A gateway whose only source is another gateway, reached as an MCP server."""
    services = Services()
    async with live_server_async(lambda: Gateway(make())) as server:
        leaf = McpToolset("front", Server(url=f"{server.url}/mcp"), services=services)
        async with Gateway([Source("mcp", leaf, leaf, trusted=False)], services=services) as gateway:
            yield gateway


@asynccontextmanager
async def recorded(make: MakeSources) -> AsyncIterator[AnyGateway]:
    with TemporaryDirectory() as folder:
        async with record_gateway(Gateway(make()), Path(folder, "tape")) as gateway:
            yield gateway


GATEWAY_KINDS: Mapping[str, OpenGateway] = {
    "in_process": in_process,
    "http": over_http,
    "gateway_behind": behind_another_gateway,
    "recorded": recorded,
}
TOOL_GATEWAY_KINDS: Mapping[str, OpenGateway] = {**GATEWAY_KINDS, "mcp": over_mcp}
"""Also over MCP, which has no rollouts or feedback, so that only tools are offered."""

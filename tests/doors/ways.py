"""The doors to one gateway. A test that takes `door` says what a gateway is, whichever way it is reached.

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
from gateway.session import AnyGateway
from gateway.table import Source
from gateway.tape import recorded
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.served import served

Make = Callable[[], Sequence[Source]]
Door = Callable[[Make], AbstractAsyncContextManager[AnyGateway]]


@asynccontextmanager
async def in_process(make: Make) -> AsyncIterator[AnyGateway]:
    async with Gateway(make()) as gateway:
        yield gateway


@asynccontextmanager
async def over_http(make: Make) -> AsyncIterator[AnyGateway]:
    async with served(lambda: Gateway(make())) as at, RemoteGateway(at.url) as gateway:
        yield gateway


@asynccontextmanager
async def through_another(make: Make) -> AsyncIterator[AnyGateway]:
    """A gateway whose only source is a gateway in another process."""
    async with served(lambda: Gateway(make())) as at, Gateway([Source("remote", RemoteGateway(at.url))]) as gateway:
        yield gateway


@asynccontextmanager
async def over_mcp(make: Make) -> AsyncIterator[AnyGateway]:
    """A gateway whose only source is another gateway, met as any MCP server is."""
    async with served(lambda: Gateway(make())) as at, Services() as services:
        leaf = McpToolset("front", Server(url=f"{at.url}/mcp"), services=services)
        async with Gateway([Source("mcp", leaf, leaf, ours=False)], services=services) as gateway:
            yield gateway


@asynccontextmanager
async def while_recorded(make: Make) -> AsyncIterator[AnyGateway]:
    with TemporaryDirectory() as folder:
        async with recorded(Gateway(make()), Path(folder, "tape")) as gateway:
            yield gateway


DOORS: Mapping[str, Door] = {
    "in_process": in_process,
    "http": over_http,
    "gateway_behind": through_another,
    "recorded": while_recorded,
}
TOOL_DOORS: Mapping[str, Door] = {**DOORS, "mcp": over_mcp}
"""MCP has no word for rollouts and their feedback, so through it a gateway offers its tools alone."""

"""A gateway's front and a client of it, over every way and in both eras."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp.client import Client
from mcp.client._memory import InMemoryTransport

from gateway.config.models import Limits, Server
from gateway.front.server import Front
from gateway.gateway import Gateway
from gateway.limit import Limited
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.toolset import prefix
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.served import served

ASKER = Path(__file__).with_name("asker.py")
ERAS = {"2025": "legacy", "2026": "auto"}
WITHIN_S = 30


def native(*functions: Any, key: str = "native") -> Source:
    toolset = NativeToolset([FunctionTool(function, owner=key) for function in functions])
    return Source(key, Limited(toolset, Limits()))


def connected(era: str, gateway: Gateway, **client: Any) -> Client:
    """Over the wire's own frames, though in this process."""
    return Client(InMemoryTransport(Front(gateway, one_client=True)), mode=ERAS[era], **client)


@asynccontextmanager
async def fronted(era: str, *sources: Source, **client: Any) -> AsyncIterator[tuple[Client, Gateway]]:
    """A client in this process, with the gateway that it talks to."""
    with anyio.fail_after(WITHIN_S):
        async with Gateway(sources) as gateway, connected(era, gateway, **client) as talking:
            yield talking, gateway


@asynccontextmanager
async def at_port(make: Callable[[], Sequence[Source]]) -> AsyncIterator[tuple[str, Gateway]]:
    """Where strangers share one gateway."""
    with anyio.fail_after(WITHIN_S):
        async with served(lambda: Gateway(make())) as at:
            yield f"{at.url}/mcp", at.gateway


@asynccontextmanager
async def asking(era: str, *upstreams: str, **client: Any) -> AsyncIterator[tuple[Client, Gateway]]:
    """A client before servers that ask back; each upstream is an era, and a name where there are several."""
    services = Services()
    sources = [_asker(one, services, alone=len(upstreams) == 1) for one in upstreams]
    with anyio.fail_after(WITHIN_S):
        async with Gateway(sources, services=services) as gateway, connected(era, gateway, **client) as talking:
            yield talking, gateway


def _asker(upstream: str, services: Services, *, alone: bool) -> Source:
    era, _, name = upstream.partition(" ")
    name = name or "asker"
    flags = ("--named", name, *(("--older",) if era == "2025" else ()))
    leaf = McpToolset(name, Server(command=sys.executable, args=(str(ASKER), *flags)), services=services)
    toolset = Limited(leaf, Limits(retries=0))
    return Source(name, toolset if alone else prefix(toolset, f"{name}_"), leaf, ours=False)


def words(result: Any) -> str:
    """The text of a result."""
    return "\n".join(block.text for block in result.content if block.type == "text")

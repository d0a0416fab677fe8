"""The roots of one client are never shown to another one, through a shared server or otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.gateway import Gateway
from gateway.mcp_client.transport import Services
from tests.live_server import live_server_async
from tests.mcp_server.clients import CLIENT_MODES, TIMEOUT_S, each_protocol, eliciting_source, text_of

CALLS = 3


def connect_with_root(url: str, protocol: str, root: str) -> Client:
    async def list_roots(ctx: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri=f"file:///{root}")])

    return Client(url, mode=CLIENT_MODES[protocol], list_roots_callback=list_roots)


@asynccontextmanager
async def two_clients(protocol: str, upstream: str, **options: Any) -> AsyncIterator[dict[str, Client]]:
    """Two clients with a root each, by its name, of one gateway with one server."""

    def make() -> Gateway:
        services = Services()
        return Gateway([eliciting_source(upstream, services, **options)], services=services)

    with anyio.fail_after(TIMEOUT_S):
        async with live_server_async(make) as server:
            url = f"{server.url}/mcp"
            async with connect_with_root(url, protocol, "one") as one, connect_with_root(url, protocol, "two") as two:
                yield {"one": one, "two": two}


async def ask_for_roots(clients: dict[str, Client]) -> dict[str, set[str]]:
    """What the calls of each client return; the clients call at the same time, each one call after the other."""
    answers: dict[str, set[str]] = {name: set() for name in clients}

    async def ask(name: str) -> None:
        for _ in range(CALLS):
            try:
                answers[name].add(text_of(await clients[name].call_tool("ask", {"whom": ["roots"]})))
            except MCPError as error:
                answers[name].add(str(error))

    async with anyio.create_task_group() as tasks:
        for name in clients:
            tasks.start_soon(ask, name)
    return answers


@each_protocol
async def test_shared_server_is_not_told_the_roots_of_several_clients(protocol: str) -> None:
    async with two_clients(protocol, "2025") as clients:
        for answers in (await ask_for_roots({"one": clients["one"]}), await ask_for_roots(clients)):
            for texts in answers.values():
                assert all("the roots of one are not for the others" in text for text in texts)
                assert not any("file:///" in text for text in texts)


@pytest.mark.parametrize(
    ("protocol", "upstream", "isolation"), [("2026", "2025", "session"), ("2025", "2026", "shared")]
)
async def test_each_call_gets_the_roots_of_its_own_client(protocol: str, upstream: str, isolation: str) -> None:
    async with two_clients(protocol, upstream, isolation=isolation) as clients:
        assert await ask_for_roots(clients) == {"one": {"file:///one"}, "two": {"file:///two"}}

"""The MCP server over HTTP: clients share the server but no state."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.client import Client

from gateway.client import RemoteGateway
from tests.mcp_server.clients import CLIENT_MODES, serve_gateway, text_of
from tests.toolset_conformance.sample_tools import make_call, sample_sources

each_protocol = pytest.mark.parametrize("protocol", CLIENT_MODES)


async def remember(client: Client, word: str, **meta: Any) -> str:
    return text_of(await client.call_tool("remember", {"word": word}, meta=meta or None))


async def test_clients_with_a_connection_have_their_own_sessions() -> None:
    async with (
        serve_gateway(sample_sources) as (url, gateway),
        Client(url, mode="legacy") as first,
        Client(url, mode="legacy") as second,
    ):
        await remember(first, "a")
        assert await remember(first, "b") == '["a", "b"]'
        assert await remember(second, "c") == '["c"]'
        assert len(gateway.sessions) == 2


@each_protocol
async def test_call_with_a_session_id_runs_in_that_session(protocol: str) -> None:
    async with (
        serve_gateway(sample_sources) as (url, _),
        RemoteGateway(url.removesuffix("/mcp")) as remote,
        remote.open() as session,
        Client(url, mode=CLIENT_MODES[protocol]) as client,
    ):
        meta = {"mtrl/session": session.id}
        await remember(client, "a", **meta)
        assert (await session.call(make_call("remember", '{"word": "b"}'))).text == '["a", "b"]'
        assert await remember(client, "c", **meta) == '["a", "b", "c"]'

"""The MCP server over HTTP: clients share the server but no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.client import RemoteGateway
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.native.function import SessionContext
from gateway.tool_table import Source
from tests.live_server import live_server_async
from tests.mcp_server.clients import CLIENT_MODES, native_source, serve_gateway, text_of
from tests.toolset_conformance.sample_tools import make_call, sample_sources
from tests.waiting import PATIENCE_S, wait_until

each_protocol = pytest.mark.parametrize("protocol", CLIENT_MODES)
DISCOVER_REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {}}


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


async def test_disconnect_of_the_client_closes_its_session() -> None:
    async with serve_gateway(sample_sources) as (url, gateway):
        async with Client(url, mode="legacy") as client:
            await remember(client, "a")
            assert len(gateway.sessions) == 1
        await wait_until(lambda: not gateway.sessions)


async def test_a_call_without_a_session_shares_nothing() -> None:
    async with serve_gateway(sample_sources) as (url, gateway), Client(url) as client:
        assert await remember(client, "a") == '["a"]'
        assert await remember(client, "b") == '["b"]'
        assert not gateway.sessions


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


@each_protocol
async def test_unknown_session_id_is_an_error(protocol: str) -> None:
    async with serve_gateway(sample_sources) as (url, _), Client(url, mode=CLIENT_MODES[protocol]) as client:
        with pytest.raises(MCPError, match="names no open session") as error_info:
            await remember(client, "a", **{"mtrl/session": "guessed"})
        assert error_info.value.code == types.INVALID_PARAMS


@each_protocol
async def test_progress_arrives_and_cancelling_ends_the_call(protocol: str) -> None:
    ended: list[bool] = []

    def make_sources() -> Sequence[Source]:
        async def hang(session: SessionContext) -> None:
            """Reports, and then never answers."""
            try:
                await session.call.on_progress(1, None, "begun")  # type: ignore[misc]
                await anyio.sleep_forever()
            finally:
                ended.append(True)

        return [native_source(hang)]

    started = anyio.Event()

    async def on_progress(*_: Any) -> None:
        started.set()

    async def call_hang() -> None:
        await client.call_tool("hang", {}, progress_callback=on_progress)

    async with serve_gateway(make_sources) as (url, _), Client(url, mode=CLIENT_MODES[protocol]) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_hang)
            await started.wait()
            assert not ended
            tasks.cancel_scope.cancel()
        await wait_until(lambda: ended)


async def test_foreign_host_and_origin_are_rejected() -> None:
    async with serve_gateway(sample_sources) as (url, _), httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        for headers in ({"host": "evil.example.com"}, {"origin": "https://evil.example.com"}):
            response = await http.post(url, json=DISCOVER_REQUEST, headers=headers)
            assert response.status_code in (403, 421)


async def test_request_without_the_token_is_unauthorized() -> None:
    settings = Settings(port=0, token="secret-word-of-ours")
    with anyio.fail_after(PATIENCE_S):
        async with (
            live_server_async(lambda: Gateway(sample_sources()), settings) as at,
            httpx2.AsyncClient(timeout=PATIENCE_S) as http,
        ):
            assert (await http.post(f"{at.url}/mcp", json=DISCOVER_REQUEST)).status_code == 401

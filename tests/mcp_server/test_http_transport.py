"""The MCP server over HTTP: clients share the server but no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.client import RemoteGateway
from gateway.native.function import SessionContext
from gateway.tool_table import Source
from tests.mcp_server.clients import CLIENT_MODES, native_source, serve_gateway, text_of
from tests.toolset_conformance.sample_tools import make_call, sample_sources
from tests.waiting import wait_until

each_protocol = pytest.mark.parametrize("protocol", CLIENT_MODES)


async def remember(client: Client, word: str, **meta: Any) -> str:
    return text_of(await client.call_tool("remember", {"word": word}, meta=meta or None))


async def test_clients_have_their_own_sessions_until_they_disconnect() -> None:
    async with serve_gateway(sample_sources) as (url, gateway):
        async with Client(url, mode="legacy") as first, Client(url, mode="legacy") as second:
            await remember(first, "a")
            assert await remember(first, "b") == '["a", "b"]'
            assert await remember(second, "c") == '["c"]'
            assert len(gateway.sessions) == 2
        await wait_until(lambda: not gateway.sessions)


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
        with pytest.raises(MCPError, match="names no open session"):
            await remember(client, "d", **{"mtrl/session": "guessed"})


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

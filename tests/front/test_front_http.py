"""Over HTTP strangers share one front, and nothing else."""

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
from gateway.table import Source
from tests.doors.kit import call, sources
from tests.front.kit import ERAS, at_port, native, words
from tests.served import served, until

era = pytest.mark.parametrize("era", ERAS)
DISCOVER = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {}}


async def remember(client: Client, word: str, **meta: Any) -> str:
    return words(await client.call_tool("remember", {"word": word}, meta=meta or None))


async def test_clients_with_a_connection_keep_their_own_state() -> None:
    async with (
        at_port(sources) as (url, gateway),
        Client(url, mode="legacy") as one,
        Client(url, mode="legacy") as other,
    ):
        await remember(one, "a")
        assert await remember(one, "b") == '["a", "b"]'
        assert await remember(other, "c") == '["c"]'
        assert len(gateway.sessions) == 2


async def test_a_client_that_leaves_gives_its_session_back() -> None:
    async with at_port(sources) as (url, gateway):
        async with Client(url, mode="legacy") as client:
            await remember(client, "a")
            assert len(gateway.sessions) == 1
        await until(lambda: not gateway.sessions)


async def test_a_call_without_a_session_shares_nothing() -> None:
    async with at_port(sources) as (url, gateway), Client(url) as client:
        assert await remember(client, "a") == '["a"]'
        assert await remember(client, "b") == '["b"]'
        assert not gateway.sessions


@era
async def test_a_call_that_names_a_session_belongs_to_it(era: str) -> None:
    async with (
        at_port(sources) as (url, _),
        RemoteGateway(url.removesuffix("/mcp")) as remote,
        remote.open() as session,
        Client(url, mode=ERAS[era]) as client,
    ):
        handle = {"mtrl/session": session.id}
        await remember(client, "a", **handle)
        assert (await session.call(call("remember", '{"word": "b"}'))).text == '["a", "b"]'
        assert await remember(client, "c", **handle) == '["a", "b", "c"]'


@era
async def test_a_session_that_is_not_there_is_refused(era: str) -> None:
    async with at_port(sources) as (url, _), Client(url, mode=ERAS[era]) as client:
        with pytest.raises(MCPError, match="names no open session") as refused:
            await remember(client, "a", **{"mtrl/session": "guessed"})
        assert refused.value.code == types.INVALID_PARAMS


@era
async def test_progress_arrives_and_giving_up_ends_the_call(era: str) -> None:
    ended: list[bool] = []

    def make() -> Sequence[Source]:
        async def hang(session: SessionContext) -> None:
            """Reports, and then never answers."""
            try:
                await session.call.progress(1, None, "begun")  # type: ignore[misc]
                await anyio.sleep_forever()
            finally:
                ended.append(True)

        return [native(hang)]

    begun = anyio.Event()

    async def hear(*_: Any) -> None:
        begun.set()

    async def hang() -> None:
        await client.call_tool("hang", {}, progress_callback=hear)

    async with at_port(make) as (url, _), Client(url, mode=ERAS[era]) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await begun.wait()
            assert not ended
            tasks.cancel_scope.cancel()
        await until(lambda: ended)


async def test_a_page_of_another_site_is_refused() -> None:
    async with at_port(sources) as (url, _), httpx2.AsyncClient() as web:
        for headers in ({"host": "evil.example.com"}, {"origin": "https://evil.example.com"}):
            answer = await web.post(url, json=DISCOVER, headers=headers)
            assert answer.status_code in (403, 421)


async def test_a_caller_without_the_token_does_not_come_in() -> None:
    settings = Settings(port=0, token="secret-word-of-ours")
    with anyio.fail_after(20):
        async with served(lambda: Gateway(sources()), settings) as at, httpx2.AsyncClient() as web:
            assert (await web.post(f"{at.url}/mcp", json=DISCOVER)).status_code == 401

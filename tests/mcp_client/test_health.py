"""Health checks: what counts as a sign of life, and what a hung server costs."""

from __future__ import annotations

import anyio
import pytest

from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Outcome, Task, ToolCall
from tests.mcp_client.mcp_toolsets import call_tool, misbehaving_toolset
from tests.waiting import PATIENCE_S, wait_until

UNHURRIED = {"ping_timeout_s": PATIENCE_S}
"""A machine that stands still is not taken for a server that hangs."""


async def hang(server: McpToolset) -> None:
    """A call that times out. One that was not even sent in time is no timeout of the server, and is made again."""
    (connection,) = server.pool.connections
    counted = connection.health.timeouts
    while connection.health.timeouts == counted and connection.is_usable:
        with anyio.move_on_after(0.2):
            await call_tool(server, "hang")


async def test_timeouts_in_a_row_restart_a_server_that_answers_pings(caplog: pytest.LogCaptureFixture) -> None:
    async with misbehaving_toolset("stdio", timeouts_in_a_row=2, **UNHURRIED) as server:
        (pid,), (connection,) = server.status.children, server.pool.connections
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(hang, server)
        assert connection.health.timeouts == 1, "those at the same time count once"
        assert (await call_tool(server, "echo", text="here")).outcome is Outcome.OK and not connection.health.timeouts
        await hang(server)
        await hang(server)
        await wait_until(lambda: server.status.reconnects == 1)
        assert server.status.last_loss == "2 calls in a row were not answered in time"
        assert server.status.children != (pid,)
        await wait_until(lambda: "works again" in caplog.text)
        assert "server 'it' is down: 2 calls in a row" in caplog.text


async def test_server_that_ignores_pings_lives_while_it_lists_its_tools() -> None:
    async with misbehaving_toolset("stdio", "--ignore-pings", ping_s=0.1, **UNHURRIED) as server:
        (connection,) = server.pool.connections
        heard_at = connection.health.heard_at
        await wait_until(lambda: connection.health.heard_at > heard_at)
        assert connection.is_usable and (await call_tool(server, "echo", text="here")).text == "here"


async def test_hung_server_of_one_session_is_ended_and_the_session_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options = {"isolation": "process", "most": 2, "timeouts_in_a_row": 1}
    async with misbehaving_toolset("stdio", **options) as server:
        async with server.open(Task()) as session, server.open(Task()) as other:
            assert (await other.call(ToolCall("1", "count"))).text == "1"
            assert (await session.call(ToolCall("1", "count"))).text == "1"
            while session._connection.is_usable:  # type: ignore[attr-defined]
                with anyio.move_on_after(0.2):
                    await session.call(ToolCall("1", "hang"))
            await wait_until(lambda: "the connection of one session was closed" in caplog.text)
            result = await session.call(ToolCall("2", "count"))
            assert result.outcome is Outcome.UNAVAILABLE and "the session's state was lost" in (result.reason or "")
            assert (await other.call(ToolCall("2", "count"))).text == "2"
        assert server.status.state == "up"

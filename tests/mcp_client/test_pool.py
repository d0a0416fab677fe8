"""Connection pools: isolation of rollouts, limits, warm and idle connections."""

from __future__ import annotations

import anyio
import psutil
import pytest

from gateway.mcp_client import pool
from gateway.types import DEFAULT_CONTEXT, Outcome, Task, ToolCall, ToolResult
from tests.mcp_client.mcp_toolsets import TRANSPORTS, call_tool, misbehaving_toolset
from tests.waiting import PATIENCE_S, wait_until

all_transports = pytest.mark.parametrize("transport", TRANSPORTS)
COUNT_CALL = ToolCall("1", "count")


@all_transports
async def test_session_isolation_keeps_state_per_rollout(transport: str) -> None:
    async with misbehaving_toolset(transport, isolation="session") as server:
        async with server.open(Task()) as first, server.open(Task()) as second:
            assert [(await session.call(COUNT_CALL)).text for session in (first, second, first)] == ["1", "1", "2"]
        async with server.open(Task()) as later:
            assert (await later.call(COUNT_CALL)).text == "1"


async def test_process_isolation_ends_the_process_with_the_rollout() -> None:
    async with misbehaving_toolset("stdio", isolation="process") as server:
        async with server.open(Task()) as first, server.open(Task()) as second:
            pids = {int((await session.call(ToolCall("1", "pid"))).text) for session in (first, second)}
            assert len(pids) == 2
        await wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_connection_acquired_after_the_session_closed_is_released() -> None:
    async with misbehaving_toolset("stdio", isolation="process", most=1) as server:
        async with server.open(Task()) as first, server.open(Task()) as late:
            assert (await first.call(COUNT_CALL)).text == "1"
            results: list[ToolResult] = []

            async def count() -> None:
                results.append(await late.call(COUNT_CALL))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(count)
                await anyio.wait_all_tasks_blocked()
                late.close()  # type: ignore[attr-defined]
                first.close()  # type: ignore[attr-defined]
        assert [result.outcome for result in results] == [Outcome.UNAVAILABLE]
        assert (await call_tool(server, "count")).text == "1"


async def test_concurrent_first_calls_share_one_connection() -> None:
    texts: list[str] = []
    async with misbehaving_toolset("stdio", isolation="session") as server, server.open(Task()) as session:

        async def count() -> None:
            texts.append((await session.call(COUNT_CALL)).text)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(count)
    assert sorted(texts) == ["1", "2", "3", "4", "5"]


async def test_rollouts_beyond_the_limit_wait_and_get_fresh_state() -> None:
    counts: list[str] = []
    async with misbehaving_toolset("stdio", isolation="process", most=2) as server:
        two_started, started = anyio.Event(), 0

        async def rollout() -> None:
            nonlocal started
            async with server.open(Task()) as session:
                counts.append((await session.call(COUNT_CALL)).text)
                started += 1
                if started == 2:
                    two_started.set()
                await two_started.wait()

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(rollout)
            await two_started.wait()
            assert len(server.pool.connections) <= 2
    assert counts == ["1"] * 5


async def test_wait_until_the_callers_deadline_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "remaining_wait_s", lambda: 0.3)
    async with (
        misbehaving_toolset("stdio", isolation="process", most=1) as server,
        server.open(Task()) as first,
        server.open(Task()) as second,
    ):
        await first.call(COUNT_CALL)
        with anyio.fail_after(PATIENCE_S):
            result = await second.call(COUNT_CALL)
        assert result.outcome is Outcome.UNAVAILABLE
        assert "`most`" in (result.reason or "")


async def test_calls_after_lost_state_are_unavailable() -> None:
    async with misbehaving_toolset("stdio", isolation="session") as server, server.open(Task()) as session:
        await session.call(COUNT_CALL)
        assert (await session.call(ToolCall("2", "crash"))).outcome is Outcome.UNKNOWN
        for _ in range(2):
            after = await session.call(COUNT_CALL)
            assert after.outcome is Outcome.UNAVAILABLE
            assert "the session's state was lost" in (after.reason or "")
        async with server.open(Task()) as fresh:
            assert (await fresh.call(COUNT_CALL)).text == "1"


async def test_warm_connections_are_opened_ahead_and_replaced() -> None:
    async with misbehaving_toolset("stdio", isolation="process", warm=2, most=5) as server:
        await wait_until(lambda: len([c for c in server.pool.connections if c.is_usable]) == 2)
        warm = [c for c in server.pool.connections if c.is_usable]
        async with server.open(Task()) as session:
            assert (await session.call(COUNT_CALL)).text == "1"
            assert session._connection in warm  # type: ignore[attr-defined]
            await wait_until(lambda: len([c for c in server.pool.connections if c.is_usable]) == 3)


async def test_leased_server_reports_failure_and_recovers() -> None:
    async with misbehaving_toolset("stdio", isolation="process", idle_s=0.1) as server:
        await wait_until(lambda: server.pool.connections == ())
        working_config, server.config = server.config, server.config.model_copy(update={"command": "/no/such/program"})
        result = await call_tool(server, "echo", text="x")
        assert result.outcome is Outcome.UNAVAILABLE and "cannot start" in (result.reason or "")
        await wait_until(lambda: server.status.state == "stale")
        assert "cannot start '/no/such/program'" in server.status.last_loss
        server.config = working_config
        await wait_until(lambda: server.status.state == "up")
        assert (await call_tool(server, "echo", text="back")).text == "back"


@all_transports
async def test_session_can_be_closed_from_another_task(transport: str) -> None:
    async with misbehaving_toolset(transport, isolation="session") as server:
        opened = server.open(Task())

        async def open_it() -> None:
            session = await opened.__aenter__()
            await session.call(COUNT_CALL)

        async def close_it() -> None:
            await opened.__aexit__(None, None, None)

        for step in (open_it, close_it):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step)
        assert (await call_tool(server, "count")).text == "1"


async def test_request_without_a_session_is_not_answered_by_the_process_of_a_session() -> None:
    async with misbehaving_toolset("stdio", isolation="process") as server, server.open(Task()) as session:
        leased = (await session.call(ToolCall("1", "pid"))).text
        assert [c for c in server.pool.connections if c.is_usable] == [session._connection]  # type: ignore[attr-defined]
        answered = await server.request("tools/call", {"name": "pid", "arguments": {}}, DEFAULT_CONTEXT)
        assert int(answered["content"][0]["text"]) != int(leased)

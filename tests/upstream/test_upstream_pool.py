"""Isolation is kept: what one rollout leaves in a server, no other rollout ever sees."""

from __future__ import annotations

import json

import anyio
import psutil
import pytest

from gateway.types import ALONE, Outcome, Task, ToolCall, ToolResult
from gateway.upstream import pool
from tests.upstream.reach import TRANSPORTS, call, eventually, reached

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)
COUNT = ToolCall("1", "count")


@everywhere
async def test_a_shared_connection_is_one_for_all_rollouts(transport: str) -> None:
    async with reached(transport) as server, server.open(Task()) as one, server.open(Task()) as other:
        assert [(await session.call(COUNT)).text for session in (one, other, one)] == ["1", "2", "3"]


@everywhere
async def test_a_rollout_of_its_own_keeps_its_state_and_shares_none(transport: str) -> None:
    async with reached(transport, isolation="session") as server:
        async with server.open(Task()) as one, server.open(Task()) as other:
            assert [(await session.call(COUNT)).text for session in (one, other, one)] == ["1", "1", "2"]
        async with server.open(Task()) as later:
            assert (await later.call(COUNT)).text == "1"


async def test_a_process_per_rollout_ends_with_it() -> None:
    async with reached("stdio", isolation="process") as server:
        async with server.open(Task()) as one, server.open(Task()) as other:
            pids = {int((await session.call(ToolCall("1", "pid"))).text) for session in (one, other)}
            assert len(pids) == 2
        await eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_a_connection_that_comes_after_its_rollout_has_closed_is_not_kept() -> None:
    async with reached("stdio", isolation="process", most=1) as server:
        async with server.open(Task()) as first, server.open(Task()) as late:
            assert (await first.call(COUNT)).text == "1"
            results: list[ToolResult] = []

            async def count() -> None:
                results.append(await late.call(COUNT))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(count)
                await anyio.wait_all_tasks_blocked()
                late.close()  # type: ignore[attr-defined]
                first.close()  # type: ignore[attr-defined]
        assert [result.outcome for result in results] == [Outcome.UNAVAILABLE]
        assert (await call(server, "count")).text == "1"


async def test_a_rollout_that_never_calls_takes_no_connection() -> None:
    async with (
        reached("stdio", isolation="process", most=1) as server,
        server.open(Task()),
        server.open(Task()),
        server.open(Task()) as third,
    ):
        assert (await third.call(COUNT)).text == "1"


async def test_the_first_calls_of_a_rollout_share_its_one_connection() -> None:
    texts: list[str] = []
    async with reached("stdio", isolation="session") as server, server.open(Task()) as session:

        async def count() -> None:
            texts.append((await session.call(COUNT)).text)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(count)
    assert sorted(texts) == ["1", "2", "3", "4", "5"]


async def test_beyond_the_cap_a_rollout_waits_for_its_turn_and_gets_fresh_state() -> None:
    got: list[str] = []
    async with reached("stdio", isolation="process", most=2) as server:
        enough, started = anyio.Event(), 0

        async def rollout() -> None:
            nonlocal started
            async with server.open(Task()) as session:
                got.append((await session.call(COUNT)).text)
                started += 1
                if started == 2:
                    enough.set()
                await enough.wait()

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(rollout)
            await enough.wait()
            assert len(server.supply.connections) <= 2
    assert got == ["1"] * 5


async def test_a_wait_beyond_the_callers_deadline_says_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MARGIN_S", 1.0)
    async with (
        reached("stdio", isolation="process", most=1) as server,
        server.open(Task()) as one,
        server.open(Task()) as other,
    ):
        await one.call(COUNT)
        with anyio.fail_after(3):
            result = await other.call(COUNT)
        assert result.outcome is Outcome.UNAVAILABLE
        assert "`most`" in (result.reason or "")


async def test_state_that_was_lost_is_never_silently_fresh() -> None:
    async with reached("stdio", isolation="session") as server, server.open(Task()) as session:
        await session.call(COUNT)
        assert (await session.call(ToolCall("2", "crash"))).outcome is Outcome.UNKNOWN
        for _ in range(2):
            after = await session.call(COUNT)
            assert after.outcome is Outcome.UNAVAILABLE
            assert "the session's state was lost" in (after.reason or "")
        async with server.open(Task()) as fresh:
            assert (await fresh.call(COUNT)).text == "1"


async def test_a_session_forgotten_by_the_server_is_lost_state_too() -> None:
    async with reached("http", isolation="session") as server, server.open(Task()) as session:
        await session.call(COUNT)
        (leased,) = [c for c in server.supply.connections if c.usable and c is session._connection]  # type: ignore[attr-defined]
        leased.close("closed behind its back")
        assert "state was lost" in ((await session.call(COUNT)).reason or "")


async def test_warm_connections_stand_ready_and_are_replaced() -> None:
    async with reached("stdio", isolation="process", warm=2, most=5) as server:
        await eventually(lambda: len([c for c in server.supply.connections if c.usable]) == 2)
        ready = [c for c in server.supply.connections if c.usable]
        async with server.open(Task()) as session:
            assert (await session.call(COUNT)).text == "1"
            assert session._connection in ready  # type: ignore[attr-defined]
            await eventually(lambda: len([c for c in server.supply.connections if c.usable]) == 3)


async def test_a_ready_connection_that_nobody_wants_is_closed() -> None:
    async with reached("stdio", isolation="process", idle_s=0.2) as server:
        await eventually(lambda: server.supply.connections == ())
        assert server.status.state == "up" and server.specs
        assert (await call(server, "echo", text="again")).text == "again"


async def test_a_server_of_leased_connections_that_fails_says_so_and_recovers() -> None:
    async with reached("stdio", isolation="process", idle_s=0.1) as server:
        await eventually(lambda: server.supply.connections == ())
        good, server.config = server.config, server.config.model_copy(update={"command": "/no/such/program"})
        result = await call(server, "echo", text="x")
        assert result.outcome is Outcome.UNAVAILABLE and "cannot start" in (result.reason or "")
        await eventually(lambda: server.status.state == "stale")
        server.config = good
        await eventually(lambda: server.status.state == "up")
        assert (await call(server, "echo", text="back")).text == "back"


@everywhere
async def test_any_task_may_close_a_session(transport: str) -> None:
    async with reached(transport, isolation="session") as server:
        opened = server.open(Task())

        async def open_it() -> None:
            session = await opened.__aenter__()
            await session.call(COUNT)

        async def close_it() -> None:
            await opened.__aexit__(None, None, None)

        for step in (open_it, close_it):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(step)
        assert (await call(server, "count")).text == "1"


async def test_a_request_of_no_session_is_answered_in_every_isolation() -> None:
    for isolation in ("shared", "process"):
        async with reached("stdio", isolation=isolation) as server:
            listed = await server.request("tools/list", {}, ALONE)
            assert "echo" in json.dumps(listed["tools"])

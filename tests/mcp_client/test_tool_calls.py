"""Tool calls to a misbehaving MCP server: each fault has its outcome and affects no other call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anyio
import pytest

from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Context, Outcome, Task, ToolCall
from tests.mcp_client.mcp_toolsets import TRANSPORT_NAMES, TRANSPORTS, call_tool, misbehaving_toolset
from tests.waiting import PATIENCE_S, wait_until

all_transports = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(scope="module", params=TRANSPORTS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[McpToolset]:
    """One server over each transport, for the tests that leave it as it is."""
    async with misbehaving_toolset(request.param, within_s=None) as server:
        yield server


@all_transports
async def test_tool_call_succeeds_over_every_transport(transport: str) -> None:
    async with misbehaving_toolset(transport) as server:
        result = await call_tool(server, "echo", text="hello")
        assert (result.outcome, result.text) == (Outcome.OK, "hello")
        assert set(result.timing) == {"connect", "upstream", "parse"}
        status = server.status
        assert (status.state, status.transport, status.protocol_version) == (
            "up",
            TRANSPORT_NAMES[transport],
            "2025-11-25",
        )
        assert status.tools == len(server.specs) > 10
        assert len(status.children) == (transport == "stdio")


@all_transports
async def test_crash_during_a_call_is_unknown_with_a_reason(transport: str) -> None:
    async with misbehaving_toolset(transport) as server:
        result = await call_tool(server, "crash", code=7)
        assert result.outcome is Outcome.UNKNOWN
        assert result.reason
        if transport == "stdio":
            assert "exited with 7" in result.reason and "told to crash" in result.reason


async def test_lost_connection_fails_only_its_own_calls_and_reconnects() -> None:
    async with misbehaving_toolset("stdio") as first, misbehaving_toolset("stdio") as second:
        results: dict[str, Outcome] = {}

        async def record_outcome(name: str, server: object, tool: str, **arguments: object) -> None:
            results[name] = (await call_tool(server, tool, **arguments)).outcome  # type: ignore[arg-type]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: record_outcome("hanging", first, "hang"))
            tasks.start_soon(lambda: record_outcome("elsewhere", second, "slow", seconds=0.3))
            await wait_until(lambda: any(connection.pending for connection in first.pool.connections))
            tasks.start_soon(lambda: record_outcome("crashing", first, "crash"))
        assert results == {"hanging": Outcome.UNKNOWN, "crashing": Outcome.UNKNOWN, "elsewhere": Outcome.OK}
        assert (await call_tool(first, "echo", text="back")).text == "back"
        assert first.status.reconnects == 1


@all_transports
async def test_oversized_answer_fails_only_its_own_call(transport: str) -> None:
    async with misbehaving_toolset(transport, result_bytes=300_000) as server:
        result = await call_tool(server, "huge", mb=1)
        assert result.outcome is Outcome.ERROR and "too large" in result.text
        assert (await call_tool(server, "echo", text="x" * 1000)).outcome is Outcome.OK


async def test_cancelling_a_call_cancels_it_on_the_server(server: McpToolset) -> None:
    started = anyio.Event()

    async def progress(done: float, total: float | None, message: str | None) -> None:
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_tool, server, "hang", Context(on_progress=progress))
        await started.wait()
        tasks.cancel_scope.cancel()
    # Over HTTP a cancelled call closes its connection, which the server notices a little later.
    with anyio.fail_after(PATIENCE_S):
        while "hang" not in (await call_tool(server, "was_cancelled")).structured["tools"]:
            pass


async def test_concurrent_calls_get_their_own_answers(server: McpToolset) -> None:
    answers: dict[int, str] = {}

    async with server.open(Task()) as session:

        async def call_echo(number: int) -> None:
            call = ToolCall(str(number), "echo", json.dumps({"text": f"answer {number}"}))
            answers[number] = (await session.call(call)).text

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(call_echo, number)
    assert answers == {number: f"answer {number}" for number in range(100)}

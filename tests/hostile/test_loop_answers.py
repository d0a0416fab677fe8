"""Answers that cost too much or cannot be read end at once, with the reason, and stop nobody else."""

from __future__ import annotations

import anyio
import pytest

from gateway.config.models import Limits
from gateway.limits import LimitedToolset
from gateway.mcp_client.listing import MAX_TOOLS
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.hostile.injector import PATIENCE_S, Entered, answering_toolset, call_answering
from tests.mcp_client.mcp_toolsets import call_tool

TRANSPORTS = ("stdio", "http", "events")
UNREADABLE = {
    "objects": "more than 100000 values",
    "deep": "nested deeper",
    "not_utf8": "not UTF-8",
    "huge_number": "digits",
    "torn": "not usable JSON",
}
"""What misbehaves, with the reason of the error."""
READABLE = ("keys", "escapes", "spaces", "huge_fraction", "bom", "whole_float_id", "fine")
NOT_TAKEN = {
    "pretty": "cannot be read: its JSON is spread over several lines",
    "utf16": "cannot be read: it is UTF-16",
    "lsp": "cannot be read: it has Content-Length headers",
    "float_id": "cannot be read: it answers no request: the answer's id is",
    "null_id": "it answers no request: no such thing",
}
"""What is no answer in time, with what is said in place of silence."""


@pytest.mark.parametrize(
    ("trick", "transport"), [*((trick, "stdio") for trick in UNREADABLE), ("objects", "http"), ("objects", "events")]
)
async def test_unreadable_answer_is_an_error_at_once(trick: str, transport: str) -> None:
    result, meanwhile = await call_answering(transport, trick, timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.ERROR
    assert UNREADABLE[trick] in (result.reason or "")
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("trick", NOT_TAKEN)
async def test_server_that_spoke_is_not_called_silent_and_not_restarted(trick: str) -> None:
    async with answering_toolset("stdio", ping_timeout_s=0.2, timeouts_in_a_row=2) as server:
        for reason in await call_in_vain(server, trick):
            assert NOT_TAKEN[trick] in reason
        assert server.status.reconnects == 0


async def test_gateway_that_is_behind_says_so_and_does_not_restart_the_server() -> None:
    async with answering_toolset("stdio", ping_timeout_s=0.2, timeouts_in_a_row=2) as server:
        with anyio.fail_after(PATIENCE_S):
            # On a busy machine, the server may be too slow to flood at the moment when a call ends.
            while not any("the gateway is behind" in reason for reason in await call_in_vain(server, "flood")):
                pass
        assert server.status.reconnects == 0


async def call_in_vain(server: McpToolset, trick: str) -> list[str]:
    """Why three calls in a row had no answer in time."""
    limited = LimitedToolset(Entered(server), Limits(timeout_s=1.0))
    async with limited.open(Task()) as session:
        late = [await session.call(ToolCall("1", trick, "{}")) for _ in range(3)]
    assert {result.outcome for result in late} == {Outcome.TIMEOUT}
    return [result.reason or "" for result in late]


async def test_answer_to_another_request_is_taken_from_no_post() -> None:
    async with answering_toolset("http") as server:
        assert "that of the request" in ((await call_tool(server, "other_id")).reason or "")
        async with anyio.create_task_group() as tasks:
            forged, results = [], []

            async def call(trick: str, into: list[ToolResult]) -> None:
                into.append(await call_tool(server, trick))

            for _ in range(4):
                tasks.start_soon(call, "next_id", forged)
                tasks.start_soon(call, "fine", results)
        assert {result.outcome for result in forged} == {Outcome.ERROR}
        assert {result.outcome for result in results} == {Outcome.OK}


async def test_tools_beyond_the_limits_of_a_page_are_quarantined_and_the_rest_works() -> None:
    async with answering_toolset("stdio", env={"MORE_TOOLS": "30000"}) as server:
        assert "`result_values`" in server.status.quarantined["(listing)"]
        assert len(server.specs) == MAX_TOOLS
        assert (await call_tool(server, "fine")).outcome is Outcome.OK


async def test_limit_on_values_is_that_of_the_settings() -> None:
    async with answering_toolset("stdio", result_values=20) as server:
        assert "more than 20 values (`result_values`)" in ((await call_tool(server, "keys")).reason or "")


async def test_long_error_text_is_cut() -> None:
    result, meanwhile = await call_answering("http", "long_error", timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.ERROR and "(12000000 characters)" in (result.reason or "")
    assert len(result.reason or "") < 20_000
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize(
    ("trick", "transport"), [*((trick, "http") for trick in READABLE), ("escapes", "stdio"), ("escapes", "events")]
)
async def test_large_answer_is_read_beside_others(trick: str, transport: str) -> None:
    result, meanwhile = await call_answering(transport, trick, timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.OK
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("transport", ["http", "events"])
async def test_batch_of_many_messages_ends_its_own_request_only(transport: str) -> None:
    result, meanwhile = await call_answering(transport, "batch", timeout_s=PATIENCE_S)
    if transport == "events":  # what cannot be read may have been another message than the answer
        assert result.outcome is Outcome.UNKNOWN and "without an answer" in (result.reason or "")
    else:
        assert result.outcome is Outcome.ERROR and "values" in (result.reason or "")
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_connection_is_usable_after_unreadable_answers(transport: str) -> None:
    async with answering_toolset(transport) as server:
        for trick in ("deep", "not_utf8", "huge_number", "torn"):
            assert (await call_tool(server, trick)).outcome is Outcome.ERROR
        assert (await call_tool(server, "fine")).structured == {"a": 1}
        assert server.status.reconnects == 0

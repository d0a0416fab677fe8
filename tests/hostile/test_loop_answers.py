"""Answers that cost too much or cannot be read end at once, with the reason, and stop nobody else."""

from __future__ import annotations

import pytest

from gateway.types import Outcome
from tests.hostile.injector import PATIENCE_S, answering_toolset, call_answering
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
READABLE = ("keys", "escapes", "spaces", "huge_fraction", "fine")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("trick", UNREADABLE)
async def test_unreadable_answer_is_an_error_at_once(trick: str, transport: str) -> None:
    result, meanwhile = await call_answering(transport, trick, timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.ERROR
    assert UNREADABLE[trick] in (result.reason or "")
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("trick", READABLE)
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

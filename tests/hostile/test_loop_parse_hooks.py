"""Parse hooks of users that hang, compute or raise: they cost their own parsing and stop nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, get_ident
from time import monotonic
from typing import Any

import pytest

from gateway.mcp_client import mcp_session
from gateway.mcp_client.parse_hook import MCPBaseTool
from gateway.tool_table import Source
from gateway.types import Outcome
from tests.hostile.injector import PATIENCE_S, Entered, call_beside
from tests.mcp_client.mcp_toolsets import misbehaving_toolset

STOP = Event()


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Ends hooks that still run when their test has ended."""
    STOP.clear()
    yield
    STOP.set()


class WaitingHook(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        STOP.wait(PATIENCE_S)
        return "late", {}


class ComputingHook(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        until = monotonic() + PATIENCE_S
        while not STOP.is_set() and monotonic() < until:
            sum(range(100))
        return "late", {}


class RaisingHook(MCPBaseTool):
    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        raise RuntimeError("no")


HOOKS = {"waits": WaitingHook, "computes": ComputingHook, "raises": RaisingHook}


@pytest.mark.parametrize("trick", HOOKS)
async def test_hook_costs_its_own_parsing_only(trick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "PARSE_TIMEOUT_S", 0.3)
    async with misbehaving_toolset("stdio", parse={"echo": HOOKS[trick]}) as server:
        result, meanwhile = await call_beside([Source("it", Entered(server))], "echo", {"text": "as it is"})
    assert (result.outcome, result.text) == (Outcome.OK, "as it is")
    assert result.metrics["parse_failed"] == 1 and HOOKS[trick].__name__ in (result.reason or "")
    meanwhile.assert_undisturbed()


async def test_hook_runs_outside_the_event_loop() -> None:
    threads: list[int] = []

    class RecordingHook(MCPBaseTool):
        def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
            threads.append(get_ident())
            return "parsed", {}

    async with misbehaving_toolset("stdio", parse={"echo": RecordingHook}) as server:
        result, _ = await call_beside([Source("it", Entered(server))], "echo", {"text": "a"})
    assert result.text == "parsed" and threads != [get_ident()]

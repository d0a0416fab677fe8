"""Parse hooks of users that hang, compute or raise: they cost their own parsing and stop nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, get_ident
from typing import Any

import pytest

from gateway.mcp_client.parse_hook import MCPBaseTool
from gateway.tool_table import Source
from tests.hostile.injector import Entered, call_beside
from tests.mcp_client.mcp_toolsets import misbehaving_toolset

STOP = Event()


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Ends hooks that still run when their test has ended."""
    STOP.clear()
    yield
    STOP.set()


async def test_hook_runs_outside_the_event_loop() -> None:
    threads: list[int] = []

    class RecordingHook(MCPBaseTool):
        def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
            threads.append(get_ident())
            return "parsed", {}

    async with misbehaving_toolset("stdio", parse={"echo": RecordingHook}) as server:
        result, _ = await call_beside([Source("it", Entered(server))], "echo", {"text": "a"})
    assert result.text == "parsed" and threads != [get_ident()]

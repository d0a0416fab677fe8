"""Servers over stdio that write without end: the connection is cut with a reason, and others go on meanwhile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import anyio
import psutil
import pytest

from gateway.config.models import Limits, Server
from gateway.http.metrics import Metrics
from gateway.limits import LimitedToolset
from gateway.loop_watchdog import LoopWatchdog
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.hostile.healthy_callers import assert_calls_go_on
from tests.hostile.injector import PATIENCE_S, Entered
from tests.hostile.stdio_flooding_server import CUT, FLOODS
from tests.mcp_client.mcp_toolsets import open_toolset

DEADLINE_S = 0.5
CUT_WITHIN_S = 40.0
"""How long a flood may take to be recognised, on a machine that is busy with other tests."""
MORE_MEMORY_BYTES = 200_000_000
RESULT_BYTES = 1_000_000
COMMAND = (sys.executable, str(Path(__file__).with_name("stdio_flooding_server.py")))
FLOODING = Server(command=COMMAND[0], args=COMMAND[1:], result_bytes=RESULT_BYTES, optional=True)


async def call_limited(limited: LimitedToolset, trick: str) -> ToolResult:
    async with limited.open(Task()) as session:
        return await session.call(ToolCall("1", trick, "{}"))


@pytest.mark.parametrize(
    "trick", ["empty_lines", "line_without_end", "long_lines", "progress", "pings", "batches", "standard_error_lines"]
)
async def test_healthy_callers_go_on_while_a_server_floods(trick: str) -> None:
    memory = psutil.Process().memory_info().rss
    with anyio.fail_after(2 * PATIENCE_S):
        async with open_toolset(FLOODING) as healthy, open_toolset(FLOODING) as hostile:
            limited = LimitedToolset(Entered(hostile), Limits(timeout_s=CUT_WITHIN_S))
            await assert_calls_go_on(healthy, lambda: call_limited(limited, trick))
    assert psutil.Process().memory_info().rss < memory + MORE_MEMORY_BYTES


@pytest.mark.parametrize("trick", CUT)
async def test_flood_without_messages_cuts_the_connection_with_its_reason(trick: str) -> None:
    async with open_toolset(FLOODING) as hostile:
        limited = LimitedToolset(Entered(hostile), Limits(timeout_s=CUT_WITHIN_S))
        result = await call_limited(limited, trick)
        assert result.outcome is Outcome.UNKNOWN
        assert "the server sent" in (result.reason or "") and "more than" in (result.reason or "")
        assert hostile.status.cuts == {CUT[trick]: 1}
        served = SimpleNamespace(
            sessions={},
            sources=[SimpleNamespace(name=hostile.name, backend=hostile, toolset=hostile)],
            loop_watchdog=LoopWatchdog(),
        )
        labels = f'reason="{CUT[trick]}",server="{hostile.name}"'
        assert f"mtrl_mcp_connections_cut_total{{{labels}}} 1.0" in Metrics(served).text.decode()  # type: ignore[arg-type]


@pytest.mark.parametrize("trick", sorted(set(FLOODS) - set(CUT)))
async def test_flood_of_messages_ends_by_the_deadline_of_the_call(trick: str) -> None:
    async with open_toolset(FLOODING) as hostile:
        result = await call_limited(LimitedToolset(Entered(hostile), Limits(timeout_s=DEADLINE_S)), trick)
    assert result.outcome is Outcome.TIMEOUT

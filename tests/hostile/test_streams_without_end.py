"""Servers that flood their callers with what is no message: the call ends with a reason, and others go on meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
from tests.hostile.flooding_server import CUT, FLOODS, HTTP_FLOODS, STDIO_FLOODS
from tests.hostile.healthy_callers import assert_calls_go_on
from tests.hostile.injector import PATIENCE_S, Entered
from tests.mcp_client.mcp_toolsets import call_tool, open_toolset

SCRIPT = str(Path(__file__).with_name("flooding_server.py"))
PATHS = {"streamable-http": "/mcp", "sse": "/sse"}
RESULT_BYTES = 1_000_000
WITHIN_S = 60.0
"""How long a flood may take to be recognised, on a machine that is busy with other tests."""
MORE_MEMORY_BYTES = 300_000_000
"""How much the process may grow while a server sends gigabytes."""

ROWS = [
    *((trick, "streamable-http") for trick in FLOODS),
    ("comments", "sse"),  # It is read by the same parser.
    ("data_without_end", "sse"),
    *((trick, "streamable-http") for trick in HTTP_FLOODS),
]


def flooding_server() -> Iterator[str]:
    with subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


hostile_url = pytest.fixture(scope="module", name="hostile_url")(flooding_server)
healthy_url = pytest.fixture(scope="module", name="healthy_url")(flooding_server)


def config(url: str, transport: str = "streamable-http") -> Server:
    about = {"url": url + PATHS[transport], "transport": transport}
    return Server.model_validate({**about, "result_bytes": RESULT_BYTES, "optional": True})


@pytest.mark.parametrize(("trick", "transport"), ROWS)
async def test_flood_ends_with_a_reason_while_healthy_callers_go_on(
    hostile_url: str, healthy_url: str, trick: str, transport: str
) -> None:
    memory = psutil.Process().memory_info().rss
    async with open_toolset(config(healthy_url)) as healthy, open_toolset(config(hostile_url, transport)) as hostile:
        with anyio.fail_after(WITHIN_S):
            result = await call_tool(hostile, trick)
            cuts = hostile.status.cuts
            await assert_calls_go_on(healthy, lambda: call_tool(hostile, trick))
    assert result.outcome in (Outcome.UNKNOWN, Outcome.ERROR), result
    assert "the server sent" in (result.reason or ""), result
    assert sum(cuts.values()) >= 1 and set(cuts) <= {"comments", "headers", "framing", "line", "event"}
    assert psutil.Process().memory_info().rss < memory + MORE_MEMORY_BYTES


@pytest.mark.parametrize("transport", PATHS)
async def test_events_that_are_no_messages_leave_healthy_callers_their_time(
    hostile_url: str, healthy_url: str, transport: str
) -> None:
    async with open_toolset(config(healthy_url)) as healthy, open_toolset(config(hostile_url, transport)) as hostile:
        with anyio.fail_after(WITHIN_S):
            await assert_calls_go_on(healthy, lambda: call_tool(hostile, "garbage_events"))


@pytest.mark.parametrize("transport", PATHS)
async def test_answer_after_a_huge_id_is_read(hostile_url: str, transport: str) -> None:
    settings = config(hostile_url, transport).model_copy(update={"result_bytes": 20_000_000})
    async with open_toolset(settings) as hostile:
        with anyio.fail_after(WITHIN_S):
            result = await call_tool(hostile, "long_id")
    assert (result.outcome, result.text) == (Outcome.OK, "fine")


async def test_huge_id_is_never_sent_back(hostile_url: str) -> None:
    settings = config(hostile_url).model_copy(update={"result_bytes": 20_000_000})
    async with open_toolset(settings) as hostile:
        with anyio.fail_after(WITHIN_S):
            result = await call_tool(hostile, "long_id_lost")
            assert result.outcome is Outcome.UNKNOWN
            assert "ended without an answer" in (result.reason or "")
            assert (await call_tool(hostile, "echo", text="still here")).text == "still here"


DEADLINE_S = 0.5
FLOODING = Server(command=sys.executable, args=(SCRIPT, "stdio"), result_bytes=RESULT_BYTES, optional=True)


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
            limited = LimitedToolset(Entered(hostile), Limits(timeout_s=WITHIN_S))
            await assert_calls_go_on(healthy, lambda: call_limited(limited, trick))
    assert psutil.Process().memory_info().rss < memory + MORE_MEMORY_BYTES


@pytest.mark.parametrize("trick", CUT)
async def test_flood_without_messages_cuts_the_connection_with_its_reason(trick: str) -> None:
    async with open_toolset(FLOODING) as hostile:
        limited = LimitedToolset(Entered(hostile), Limits(timeout_s=WITHIN_S))
        result = await call_limited(limited, trick)
        assert result.outcome is Outcome.UNKNOWN
        assert "the server sent" in (result.reason or "") and "more than" in (result.reason or "")
        assert hostile.status.cuts == {CUT[trick]: 1}
        source = SimpleNamespace(name=hostile.name, backend=hostile, toolset=hostile)
        served = SimpleNamespace(sessions={}, sources=[source], loop_watchdog=LoopWatchdog())
        labels = f'reason="{CUT[trick]}",server="{hostile.name}"'
        assert f"mtrl_mcp_connections_cut_total{{{labels}}} 1.0" in Metrics(served).text.decode()  # type: ignore[arg-type]


@pytest.mark.parametrize("trick", sorted(set(STDIO_FLOODS) - set(CUT)))
async def test_flood_of_messages_ends_by_the_deadline_of_the_call(trick: str) -> None:
    async with open_toolset(FLOODING) as hostile:
        result = await call_limited(LimitedToolset(Entered(hostile), Limits(timeout_s=DEADLINE_S)), trick)
    assert result.outcome is Outcome.TIMEOUT

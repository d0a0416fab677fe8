"""Servers that flood their callers with what is no message: the call ends with a reason, and others go on meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest

from gateway.config.models import Server
from gateway.types import Outcome
from tests.hostile.flooding_server import FLOODS, HTTP_FLOODS
from tests.hostile.healthy_callers import assert_calls_go_on
from tests.mcp_client.mcp_toolsets import call_tool, open_toolset

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
    command = [sys.executable, str(Path(__file__).with_name("flooding_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


hostile_url = pytest.fixture(scope="module", name="hostile_url")(flooding_server)
healthy_url = pytest.fixture(scope="module", name="healthy_url")(flooding_server)


def config(url: str, transport: str = "streamable-http") -> Server:
    return Server.model_validate(
        {"url": url + PATHS[transport], "transport": transport, "result_bytes": RESULT_BYTES, "optional": True}
    )


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

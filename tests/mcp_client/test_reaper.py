"""Tests of the reaper: no child process outlives its gateway, however the gateway ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from gateway.process.reaper import Reaper
from gateway.types import Task, ToolCall
from tests.mcp_client.mcp_toolsets import call_tool, misbehaving_toolset
from tests.waiting import PATIENCE_S, is_alive, wait_until

ROOT = Path(__file__).parents[2]
GATEWAY_SCRIPT = """
import json, sys, anyio
from gateway.config.models import Server
from gateway.types import Task, ToolCall
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from tests.servers.start_server import stdio_command

async def main():
    command, args = stdio_command("--ignore-term")
    config = Server(command=command, args=tuple(args), isolation="process")
    async with Services() as services, McpToolset("it", config, services=services) as server:
        async with server.open(Task()) as session:
            child = (await session.call(ToolCall("1", "pid"))).text
            grandchild = (await session.call(ToolCall("2", "spawn_grandchild"))).text
            daemons = json.loads((await session.call(ToolCall("3", "spawn_daemons"))).text)
            print(json.dumps([int(child), int(grandchild), *daemons]), flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
async def test_no_process_is_left_when_the_gateway_is_killed(signal_number: signal.Signals) -> None:
    command = [sys.executable, "-c", GATEWAY_SCRIPT]
    gateway = await anyio.open_process(command, stdin=None, stderr=None, cwd=ROOT)
    assert gateway.stdout is not None
    with anyio.fail_after(60):
        pids = json.loads(await BufferedByteReceiveStream(gateway.stdout).receive_until(b"\n", 200))
        assert all(is_alive(pid) for pid in pids)
        gateway.send_signal(signal_number)
        await gateway.wait()
    await gateway.aclose()
    await wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("end", ["the session closes", "the server is killed"])
async def test_no_daemon_of_a_server_is_left(end: str) -> None:
    """They left its process group and session, cleared their environment, and have no parent."""
    async with misbehaving_toolset("stdio", isolation="process") as server, server.open(Task()) as session:
        pid = int((await session.call(ToolCall("1", "pid"))).text)
        daemons = json.loads((await session.call(ToolCall("2", "spawn_daemons"))).text)
        assert pid in server.status.children
        assert len(daemons) == 4 and all(map(is_alive, daemons))
        if end == "the server is killed":
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: not any(map(is_alive, daemons)))
    await wait_until(lambda: not any(map(is_alive, [pid, *daemons])))


async def test_server_ends_when_its_supervisor_is_killed() -> None:
    async with misbehaving_toolset("stdio") as server:
        pid = int((await call_tool(server, "pid")).text)
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        await wait_until(lambda: not is_alive(pid))


async def test_killed_reaper_process_is_replaced_and_still_guards_registered_groups() -> None:
    reaper = Reaper()
    await reaper.start()
    sleeper = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    reaper.add(sleeper.pid)
    first = reaper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await wait_until(lambda: not is_alive(first))
    await reaper.start()
    assert reaper.pid != first
    await reaper.stop()
    with anyio.fail_after(PATIENCE_S):
        assert await sleeper.wait() == -signal.SIGKILL
    await sleeper.aclose()

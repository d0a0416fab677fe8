"""No child outlives its gateway, however the gateway ends."""

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

from gateway.upstream.reaper import Reaper
from tests.upstream.reach import call, eventually, reached

ROOT = Path(__file__).parents[2]
GATEWAY = """
import json, sys, anyio
from gateway.config.models import Server
from gateway.types import Task, ToolCall
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.servers.start import stdio_command

async def main():
    command, args = stdio_command("--ignore-term")
    config = Server(command=command, args=tuple(args), isolation="process")
    async with Services() as services, McpToolset("it", config, services=services) as server:
        async with server.open(Task()) as session:
            child = (await session.call(ToolCall("1", "pid"))).text
            grandchild = (await session.call(ToolCall("2", "spawn_grandchild"))).text
            print(json.dumps([int(child), int(grandchild)]), flush=True)
            await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_a_killed_gateway_leaves_no_process_behind(how: signal.Signals, anyio_backend: str) -> None:
    command = [sys.executable, "-c", GATEWAY, anyio_backend]
    gateway = await anyio.open_process(command, stdin=None, stderr=None, cwd=ROOT)
    assert gateway.stdout is not None
    with anyio.fail_after(30):
        pids = json.loads(await BufferedByteReceiveStream(gateway.stdout).receive_until(b"\n", 200))
        assert all(alive(pid) for pid in pids)
        gateway.send_signal(how)
        await gateway.wait()
    await gateway.aclose()
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_a_server_that_ignores_every_request_to_end_is_ended_with_its_children() -> None:
    async with reached("stdio", "--ignore-term") as server:
        pids = [int((await call(server, tool)).text) for tool in ("pid", "spawn_grandchild")]
        assert all(alive(pid) for pid in pids)
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_a_guard_that_was_killed_is_replaced_and_still_knows_whom_to_guard() -> None:
    reaper = Reaper()
    await reaper.start()
    sleeper = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    reaper.add(sleeper.pid)
    first = reaper.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: not alive(first))
    await reaper.start()
    assert reaper.pid != first
    await reaper.stop()
    with anyio.fail_after(10):
        assert await sleeper.wait() == -signal.SIGKILL
    await sleeper.aclose()


async def test_a_group_that_was_forgotten_is_left_alone() -> None:
    reaper = Reaper()
    await reaper.start()
    sleeper = await anyio.open_process([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    reaper.add(sleeper.pid)
    reaper.remove(sleeper.pid)
    await reaper.stop()
    assert alive(sleeper.pid)
    sleeper.kill()
    with anyio.fail_after(10):
        await sleeper.wait()
    await sleeper.aclose()


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

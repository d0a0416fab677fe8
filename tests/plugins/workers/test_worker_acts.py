"""What must not be done twice is done only once the training process knows of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from gateway.session import AnyGateway
from gateway.types import Task, ToolCall
from mtrl_plugins.workers.line_channel import LineChannel
from mtrl_plugins.workers.worker_process import PlayedRollout, WatchedGateway, Worker
from tests.plugins.workers.pools import GatedEngine, make_job, write_tools


class ToolsThatCount:
    """A gateway, and its session, that notes calls."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.specs = [
            SimpleNamespace(name=name, hints=SimpleNamespace(repeatable=name == "safe")) for name in ("safe", "act")
        ]

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Any]:
        yield self

    async def call(self, call: ToolCall, context: object) -> None:
        self.called.append(call.name)


@pytest.mark.anyio
async def test_tool_waits_for_the_training_processs_answer(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    channel = cast(LineChannel, SimpleNamespace(send=sent.append))
    worker = Worker(channel, make_job(write_tools(tmp_path), GatedEngine(), 60))
    rollout = worker.playing[7] = PlayedRollout(worker, 7)
    tools = ToolsThatCount()
    gateway = WatchedGateway(cast(AnyGateway, tools), rollout.announce_act)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as calls, gateway.open(Task()) as session:
            await session.call(ToolCall("0", "safe", {}))
            assert sent == []
            calls.start_soon(session.call, ToolCall("1", "act", {}))
            await anyio.wait_all_tasks_blocked()
            assert sent == [{"t": "acted", "r": 7}] and tools.called == ["safe"]
            worker.handle("act", {"t": "act", "r": 7})
        async with gateway.open(Task()) as session:
            await session.call(ToolCall("2", "act", {}))
    assert tools.called == ["safe", "act", "act"] and len(sent) == 1

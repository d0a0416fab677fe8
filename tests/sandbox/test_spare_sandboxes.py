"""Sandboxes that are started in advance: each serves one rollout, and none is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import Unavailable
from gateway.process.reaper import Reaper
from gateway.sandbox.provider import BubblewrapProvider, LocalSandbox
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import SandboxStates
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.state.prepared_state import PreparedStates
from gateway.types import Outcome, Task, ToolCall
from tests.sandbox.conftest import SMALL
from tests.waiting import wait_until


class CountingProvider(BubblewrapProvider):
    """Keeps what it has started."""

    def __init__(self, reaper: Reaper) -> None:
        super().__init__(reaper)
        self.started: list[LocalSandbox] = []
        self.is_down = False

    async def start(self, settings: SandboxSettings, state: Path | None = None, **options: Any) -> LocalSandbox:
        if self.is_down:
            raise Unavailable("no sandbox can be started")
        self.started.append(await super().start(settings, state, **options))
        return self.started[-1]


@asynccontextmanager
async def warm_tools(state: Path | None = None) -> AsyncIterator[tuple[SandboxToolset, CountingProvider]]:
    """The tools with one spare sandbox, which is ready."""
    reaper = Reaper()
    try:
        provider = CountingProvider(reaper)
        toolset = SandboxToolset(("python",), SMALL, provider)
        toolset.warm = 1
        if state is not None:
            toolset.states = SandboxStates(PreparedStates(state, state.parent), reaper)
        async with toolset:
            await wait_for_spare(toolset)
            yield toolset, provider
        assert not any(sandbox.alive for sandbox in provider.started)
    finally:
        with anyio.CancelScope(shield=True):
            await reaper.stop()


async def wait_for_spare(toolset: SandboxToolset) -> None:
    spares = toolset.spares
    assert spares is not None
    await wait_until(lambda: spares.ready == 1)


async def run(toolset: SandboxToolset, code: str, state: str = "") -> str:
    async with toolset.open(Task(state=state)) as session:
        result = await session.call(ToolCall("1", "python", json.dumps({"code": code})))
        assert result.outcome is Outcome.OK, result
        return result.text


async def test_each_rollout_gets_a_spare_of_its_own_and_a_new_one_is_started(tmp_path: Path) -> None:
    (tmp_path / "states" / "other").mkdir(parents=True)
    (tmp_path / "states" / "one").mkdir()
    (tmp_path / "states" / "one" / "a.txt").write_text("first")
    code = "import os; left = globals().get('kept'); kept = open('b', 'x'); print(left, sorted(os.listdir()))"
    async with warm_tools(tmp_path / "states" / "one") as (toolset, provider):
        for number in (1, 2):
            assert len(provider.started) == number
            assert await run(toolset, code) == "None ['a.txt', 'b']"
            await wait_for_spare(toolset)
        assert await run(toolset, code, state="other") == "None ['b']"
        assert len(provider.started) == 4  # Two rollouts, the spare, and the one with a state of its own.


async def test_spare_that_has_ended_is_not_given_to_a_rollout() -> None:
    async with warm_tools() as (toolset, provider):
        process = provider.started[0]._process.process
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        assert await run(toolset, "1 + 1") == "2"


async def test_rollout_tells_why_there_is_no_sandbox_where_spares_cannot_be_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with warm_tools() as (toolset, provider):
        provider.is_down = True
        assert await run(toolset, "1 + 1") == "2"
        async with toolset.open(Task()) as session:
            result = await session.call(ToolCall("1", "python", '{"code": "1"}'))
        assert result.outcome is Outcome.UNAVAILABLE and "no sandbox can be started" in str(result.reason)
        await wait_until(lambda: "a spare sandbox could not be started" in caplog.text)

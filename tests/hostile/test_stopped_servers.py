"""Servers that are stopped for a while (SIGSTOP) and continued, and a gateway that two trainings share.

What was under way is lost to infrastructure, is never scored, and is made again; the run goes on.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from gateway.client import RemoteGateway
from gateway.gateway import Gateway
from gateway.types import Outcome, ToolCall
from tests.hostile.test_http_requests import small_gateway
from tests.servers.start_server import stdio_command
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, make_tasks, render_calls, script_by_task
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.scheduler import Group, Scheduler
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits

PATIENCE_S = 100.0
"""A test that takes longer hangs."""
DEADLINE_S = 2.0
ECHO = (render_calls(("echo", {"text": "still here"})), "done")
PICK = (render_calls(("pick", {"colour": "red"})), "done")


async def run_group(
    gateway: Any, turns: tuple[str, ...], on_rollout: Callable[[Rollout], None] = lambda _: None
) -> tuple[list[Group], list[Rollout]]:
    """Runs one task twice, one rollout after the other; returns its group and every rollout as it ended."""
    ended: list[Rollout] = []

    async def keep(rollout: Rollout) -> None:
        ended.append(rollout)
        on_rollout(rollout)

    engine = ScriptedEngine(script_by_task({"t": turns}))
    runner = RolloutRunner(engine, make_template(HERMES), gateway, RolloutLimits(rollout_tokens=100_000))
    scheduler = Scheduler(runner, 2, admission=Admission(ConcurrencySettings(inflight_rollouts=1)), sink=keep)
    async with scheduler.submit(make_tasks("t")) as groups:
        return [group async for group in groups], ended


async def assert_made_again(gateway: Any, turns: tuple[str, ...], pid: int) -> None:
    """Runs a group on a stopped process, which continues when the first rollout is lost."""
    os.kill(pid, signal.SIGSTOP)
    try:
        (group,), ended = await run_group(gateway, turns, lambda _: os.kill(pid, signal.SIGCONT))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [rollout.stop for rollout in group.rollouts] == [StopReason.DONE] * 2
    lost = [rollout for rollout in ended if rollout.stop is not StopReason.DONE]
    assert lost and all(rollout.stop is StopReason.TOOL_FAILED and rollout.reason for rollout in lost)
    assert all(rollout.reward is None for rollout in lost) and len(ended) == 2 + len(lost)


async def test_stopped_stdio_server_loses_rollouts_that_are_made_again(tmp_path: Path) -> None:
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": args}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"server": "odd", "timeout_s": DEADLINE_S}]}))
    with anyio.fail_after(PATIENCE_S):
        async with Gateway.load(tmp_path / "tools.yaml", tmp_path / "mcp_servers.json") as gateway:
            async with gateway.open() as session:
                (part,) = (await session.call(ToolCall("1", "pid", "{}"))).parts
            await assert_made_again(gateway, ECHO, int(getattr(part, "text", "")))
            assert not gateway.sessions


async def test_call_that_a_stopped_gateway_gets_ends_at_its_deadline_and_later_ones_are_answered() -> None:
    with anyio.fail_after(PATIENCE_S), small_gateway() as served:
        url = f"http://{served.host}:{served.port}"
        async with RemoteGateway(url) as gateway, gateway.open() as session:
            gateway.__dict__["_http"].timeout = DEADLINE_S  # From now on: opening should simply work.
            call = ToolCall("1", "pick", '{"colour": "red"}')
            os.kill(served.process.pid, signal.SIGSTOP)
            try:
                result = await session.call(call)
            finally:
                os.kill(served.process.pid, signal.SIGCONT)
            assert result.outcome is Outcome.TIMEOUT and result.outcome.is_infrastructure
            while (result := await session.call(call)).outcome is not Outcome.OK:
                assert result.outcome is Outcome.TIMEOUT, "on a machine that is busy"

"""Servers that are stopped for a while (SIGSTOP) and continued.

What was under way is lost to infrastructure, is never scored, and is made again; the run goes on.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

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
from trainer.rollout.scheduler import Scheduler
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits

PATIENCE_S = 100.0
"""A test that takes longer hangs."""
DEADLINE_S = 2.0


async def test_stopped_stdio_server_loses_rollouts_that_are_made_again(tmp_path: Path) -> None:
    """The server continues when the first rollout is lost."""
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": args}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"server": "odd", "timeout_s": DEADLINE_S}]}))
    ended: list[Rollout] = []
    with anyio.fail_after(PATIENCE_S):
        async with Gateway.load(tmp_path / "tools.yaml", tmp_path / "mcp_servers.json") as gateway:
            async with gateway.open() as session:
                pid = int((await session.call(ToolCall("1", "pid", "{}"))).text)

            async def keep(rollout: Rollout) -> None:
                ended.append(rollout)
                os.kill(pid, signal.SIGCONT)

            engine = ScriptedEngine(script_by_task({"t": (render_calls(("echo", {"text": "still here"})), "done")}))
            runner = RolloutRunner(engine, make_template(HERMES), gateway, RolloutLimits(rollout_tokens=100_000))
            one_by_one = Admission(ConcurrencySettings(inflight_rollouts=1))
            os.kill(pid, signal.SIGSTOP)
            try:
                async with Scheduler(runner, 2, admission=one_by_one, sink=keep).submit(make_tasks("t")) as groups:
                    (group,) = [group async for group in groups]
            finally:
                os.kill(pid, signal.SIGCONT)
            assert not gateway.sessions
    assert [rollout.stop for rollout in group.rollouts] == [StopReason.DONE] * 2
    lost = [rollout for rollout in ended if rollout.stop is not StopReason.DONE]
    assert lost and all(rollout.stop is StopReason.TOOL_FAILED and rollout.reason for rollout in lost)
    assert all(rollout.reward is None for rollout in lost) and len(ended) == 2 + len(lost)


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

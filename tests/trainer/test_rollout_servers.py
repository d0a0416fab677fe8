"""Rollouts with failing MCP servers: only the rollout whose call failed ends, and it is never scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Outcome
from tests.servers.start_server import stdio_command
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, make_tasks, render_calls, script_by_task
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import StopReason
from trainer.rollout.scheduler import Group, Scheduler
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits
from trainer.view.counters import RolloutCounters

ECHO = (render_calls(("echo", {"text": "still here"})), "done")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": list(args)}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    return tmp_path


async def run_groups(
    folder: Path,
    texts: dict[str, Sequence[str]],
    *,
    count: int = 2,
    limits: RolloutLimits | None = None,
    admission: ConcurrencySettings | None = None,
    **entry: Any,
) -> tuple[dict[str, Group], RolloutCounters]:
    """Runs a group for each task in `texts` at once, with one misbehaving server; returns groups by task."""
    (folder / "tools").mkdir()
    (folder / "tools/odd.yaml").write_text(json.dumps({"tools": [{"server": "odd", **entry}]}))
    counts = RolloutCounters()
    with anyio.fail_after(60):
        async with Gateway.load(folder / "tools", folder / "mcp_servers.json") as gateway:
            engine = ScriptedEngine(script_by_task(texts))
            limits_or_default = limits or RolloutLimits(rollout_tokens=100_000)
            runner = RolloutRunner(engine, make_template(HERMES), gateway, limits_or_default, observer=counts)
            scheduler = Scheduler(runner, count, admission=Admission(admission or ConcurrencySettings()), max_retries=0)
            async with scheduler.submit(make_tasks(*texts)) as groups:
                groups_by_task = {group.task.id: group async for group in groups}
            assert not gateway.sessions
    return groups_by_task, counts


async def test_hanging_tool_times_out_without_delaying_other_rollouts(folder: Path) -> None:
    groups_by_task, counts = await run_groups(
        folder, {"hangs": (render_calls(("hang", {})),), "lives": ECHO}, timeout_s=2
    )
    assert [rollout.stop for rollout in groups_by_task["lives"].rollouts] == [StopReason.DONE] * 2
    for rollout in groups_by_task["hangs"].failed:
        assert rollout.stop is StopReason.TOOL_FAILED and "no answer within 2 s" in rollout.reason
        assert rollout.ledger.entries[-1].outcomes == (Outcome.TIMEOUT,)
    assert counts.snapshot().outcomes[Outcome.TIMEOUT] == 2

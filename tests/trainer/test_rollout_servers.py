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
from trainer.rollout.rollout import Rollout, StopReason
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


def join_answers(rollout: Rollout) -> str:
    return str([message["content"] for entry in rollout.ledger for message in entry.messages])


async def test_server_crash_ends_only_the_rollout_that_called_it(folder: Path) -> None:
    texts = {"dies": (render_calls(("crash", {"code": 3})), "never written"), "lives": ECHO}
    groups_by_task, counts = await run_groups(folder, texts, isolation="process")
    assert [rollout.stop for rollout in groups_by_task["lives"].rollouts] == [StopReason.DONE] * 2
    assert all("still here" in join_answers(rollout) for rollout in groups_by_task["lives"].rollouts)
    assert groups_by_task["dies"].dropped and len(groups_by_task["dies"].failed) == 2
    for rollout in groups_by_task["dies"].failed:
        assert rollout.stop is StopReason.TOOL_FAILED and rollout.rewards == {} and rollout.reason
        assert rollout.ledger.entries[-1].outcomes[0].is_infrastructure
    snapshot = counts.snapshot()
    assert (snapshot.stops[StopReason.TOOL_FAILED], snapshot.stops[StopReason.DONE]) == (2, 2)


async def test_crashed_shared_server_restarts_for_later_rollouts(folder: Path) -> None:
    pid_turns = (render_calls(("pid", {})), "done")
    texts = {"before": pid_turns, "dies": (render_calls(("crash", {})), "never written"), "after": pid_turns}
    groups_by_task, _ = await run_groups(folder, texts, count=1, admission=ConcurrencySettings(inflight_rollouts=1))
    assert groups_by_task["dies"].dropped and groups_by_task["dies"].failed[0].stop is StopReason.TOOL_FAILED
    pids = [groups_by_task[name].rollouts[0].ledger.entries[2].messages[0]["content"] for name in ("before", "after")]
    assert pids[0] != pids[1] and all(text.isdigit() for text in pids)


async def test_hanging_tool_times_out_without_delaying_other_rollouts(folder: Path) -> None:
    groups_by_task, counts = await run_groups(
        folder, {"hangs": (render_calls(("hang", {})),), "lives": ECHO}, timeout_s=2
    )
    assert [rollout.stop for rollout in groups_by_task["lives"].rollouts] == [StopReason.DONE] * 2
    for rollout in groups_by_task["hangs"].failed:
        assert rollout.stop is StopReason.TOOL_FAILED and "no answer within 2 s" in rollout.reason
        assert rollout.ledger.entries[-1].outcomes == (Outcome.TIMEOUT,)
    assert counts.snapshot().outcomes[Outcome.TIMEOUT] == 2

"""Rollouts on servers that break in mid-run: the one that called is ended and never scored, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Outcome
from tests.servers.start import stdio_command
from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES, by_task, calling, tasks
from trainer.config import Admission, GroupRules, RolloutLimits
from trainer.engine.scripted import ScriptedEngine
from trainer.groups import Group, Groups
from trainer.play import Player
from trainer.run.rollout import Rollout, StopReason
from trainer.view.counts import Counts

ECHO = (calling(("echo", {"text": "still here"})), "done")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    command, args = stdio_command()
    servers = {"mcpServers": {"odd": {"command": command, "args": list(args)}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    return tmp_path


async def played(
    folder: Path,
    said: dict[str, Sequence[str]],
    *,
    count: int = 2,
    limits: RolloutLimits | None = None,
    admission: Admission | None = None,
    **entry: Any,
) -> tuple[dict[str, Group], Counts]:
    """Groups by their task; one task for each thing said, at once, on one odd server."""
    (folder / "tools").mkdir()
    (folder / "tools/odd.yaml").write_text(json.dumps({"tools": [{"server": "odd", **entry}]}))
    counts = Counts()
    with anyio.fail_after(60):
        async with Gateway.load(folder / "tools", folder / "mcp_servers.json") as gateway:
            engine = ScriptedEngine(by_task(said))
            long = limits or RolloutLimits(rollout_tokens=100_000)
            player = Player(engine, template_for(HERMES), gateway, long, watch=counts)
            rules = GroupRules(on_failure="rest")
            groups = Groups(player, count, admission=admission or Admission(), rules=rules)
            async with groups.play(tasks(*said)) as done:
                found = {group.task.id: group async for group in done}
            assert not gateway.sessions
    return found, counts


def answers(rollout: Rollout) -> str:
    return str([message["content"] for entry in rollout.ledger for message in entry.messages])


async def test_a_server_that_dies_ends_only_the_rollout_that_it_died_under(folder: Path) -> None:
    said = {"dies": (calling(("crash", {"code": 3})), "never said"), "lives": ECHO}
    found, counts = await played(folder, said, isolation="process")
    assert [rollout.stop for rollout in found["lives"].rollouts] == [StopReason.DONE] * 2
    assert all("still here" in answers(rollout) for rollout in found["lives"].rollouts)
    assert found["dies"].dropped and len(found["dies"].failed) == 2
    for rollout in found["dies"].failed:
        assert rollout.stop is StopReason.TOOL_FAILED and rollout.rewards == {} and rollout.reason
        assert rollout.ledger.entries[-1].outcomes[0].infrastructure
    seen = counts.seen()
    assert (seen.stops[StopReason.TOOL_FAILED], seen.stops[StopReason.DONE]) == (2, 2)


async def test_a_shared_server_that_died_is_there_again_for_the_rollouts_after_it(folder: Path) -> None:
    asks_who = (calling(("pid", {})), "done")
    said = {"before": asks_who, "dies": (calling(("crash", {})), "never said"), "after": asks_who}
    found, _ = await played(folder, said, count=1, admission=Admission(open=1))
    assert found["dies"].dropped and found["dies"].failed[0].stop is StopReason.TOOL_FAILED
    who = [found[name].rollouts[0].ledger.entries[2].messages[0]["content"] for name in ("before", "after")]
    assert who[0] != who[1] and all(text.isdigit() for text in who)


async def test_a_tool_that_never_answers_is_a_timeout_and_keeps_nobody_waiting(folder: Path) -> None:
    found, counts = await played(folder, {"hangs": (calling(("hang", {})),), "lives": ECHO}, timeout_s=2)
    assert [rollout.stop for rollout in found["lives"].rollouts] == [StopReason.DONE] * 2
    for rollout in found["hangs"].failed:
        assert rollout.stop is StopReason.TOOL_FAILED and "no answer within 2 s" in rollout.reason
        assert rollout.ledger.entries[-1].outcomes == (Outcome.TIMEOUT,)
    assert counts.seen().outcomes[Outcome.TIMEOUT] == 2


async def test_a_tool_that_says_no_is_read_by_the_policy_and_ends_nothing(folder: Path) -> None:
    said = {"t": (calling(("fail", {"message": "no such page"})), calling(("rpc_error", {"code": -32000})), "done")}
    found, _ = await played(folder, said)
    for rollout in found["t"].rollouts:
        assert rollout.stop is StopReason.DONE and "no such page" in answers(rollout)
        assert [entry.outcomes for entry in rollout.ledger if entry.outcomes] == [(Outcome.ERROR,), (Outcome.ERROR,)]


async def test_an_answer_longer_than_what_is_left_ends_the_rollout_without_blame_on_the_server(folder: Path) -> None:
    said = {"t": (calling(("huge", {"mb": 0.05})), "never said"), "lives": ECHO}
    found, _ = await played(folder, said, limits=RolloutLimits(rollout_tokens=9000))
    assert {rollout.stop for rollout in found["t"].rollouts} == {StopReason.LENGTH_ROLLOUT}
    assert all("does not fit" in rollout.reason for rollout in found["t"].rollouts)
    assert {rollout.stop for rollout in found["lives"].rollouts} == {StopReason.DONE}

"""Rewards by the state at the end: hashes, folders beside the data, and whole rollouts with a server of their own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.build import build_plan
from gateway.gateway import Gateway
from gateway.state.state_hash import hash_state
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, render_calls
from tests.trainer.reward.attempts import TASK, make_attempt, policy, reward_settings
from trainer.data.tasks import load_rows
from trainer.engine.scripted import ScriptedEngine
from trainer.reward.functions import find_truth_problem, state_equals
from trainer.reward.scorer import Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import STATES_INFO, StopReason
from trainer.rollout.settings import RolloutLimits

NOTES_SERVER = str(Path(__file__).parents[2] / "mcp_client" / "notes_server.py")
HASH = "sha256:" + "0" * 64


def attempt(answer: str = "", *, stop: StopReason = StopReason.DONE, truth: Any = None, **columns: Any) -> Any:
    task = replace(TASK, truth=truth, columns=columns)
    return make_attempt(policy(answer), task=task, stop=stop, infos={STATES_INFO: {"notes": HASH}})


@pytest.mark.parametrize(("end", "reward"), [(HASH, 1.0), ("sha256:1", 0.0)])
def test_state_must_be_the_expected_one(end: str, reward: float) -> None:
    assert state_equals(attempt(end_state={"notes": end})) == reward
    assert state_equals(attempt(end_state={"notes": end}, stop=StopReason.LENGTH_TURN)) == 0.0


@pytest.mark.parametrize(
    ("function", "truth", "columns", "is_scored"),
    [
        ("state_equals", "7", {}, False),
        ("state_equals", None, {"end_state": {"notes": HASH}}, True),
        ("solved", None, {}, False),
        ("solved", "7", {}, True),
        ("solved", None, {"end_state": {"notes": HASH}}, True),
    ],
)
def test_rows_that_cannot_be_scored_are_found_before_the_run(
    function: str, truth: Any, columns: dict[str, Any], is_scored: bool
) -> None:
    task = replace(TASK, truth=truth, columns=columns)
    assert (find_truth_problem(function, task) is None) is is_scored


async def test_rollouts_are_scored_by_the_state_that_their_calls_leave(tmp_path: Path) -> None:
    (tmp_path / "expected").mkdir()
    (tmp_path / "expected" / "note.txt").write_text("remember")
    args = [NOTES_SERVER, "${MTRL_ROLLOUT_DIR}"]
    server = {"command": sys.executable, "args": args, "isolation": "process"}
    (tmp_path / "mcp_servers.json").write_text(json.dumps({"mcpServers": {"notes": server}}))
    ends = (hash_state(tmp_path / "expected"), "expected", HASH)
    rows = [{"id": str(n), "prompt": "Write a note.", "end_state": {"notes": end}} for n, end in enumerate(ends)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = build_plan(None, tmp_path / "mcp_servers.json")
    turns = encode_turns(make_template(HERMES), render_calls(("write", {"text": "remember"})), "Done.")
    scores = []
    with anyio.fail_after(60):
        async with Gateway(plan.sources, services=plan.services) as gateway:
            for task in load_rows(tmp_path / "tasks.jsonl"):
                left = iter(turns)
                async with ScriptedEngine(lambda ids, sampling, key, left=left: next(left)) as engine:
                    runner = RolloutRunner(
                        engine, make_template(HERMES), gateway, RolloutLimits(rollout_tokens=100_000)
                    )
                    rollout = await runner.run(task)
                settings = reward_settings(state={"function": "state_equals"})
                (scored,) = (await Scorer(settings).score(task, [rollout])).scored
                scores.append(scored.reward)
    assert scores == [1.0, 1.0, 0.0]

"""Tests the built-in reward functions, what counts as the policy's answer, and rewards by the state at the end."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.build import build_plan
from gateway.gateway import Gateway
from gateway.state.state_hash import hash_state
from gateway.types import Outcome
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, render_calls
from tests.trainer.reward.attempts import (
    FEEDBACK_TASK,
    TASK,
    call_turn,
    feedback_entry,
    make_attempt,
    reward_settings,
    score_group,
    tool_entry,
)
from tests.trainer.sample_rollouts import policy
from trainer.data.tasks import load_rows
from trainer.engine.scripted import ScriptedEngine
from trainer.reward.functions import answer, efficiency, find_truth_problem, outcome, state_equals, tool_quality
from trainer.reward.scorer import Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import STATES_INFO, StopReason
from trainer.rollout.settings import RolloutLimits

RIGHT = "#### 7"


@pytest.mark.parametrize(
    ("text", "truth", "method", "reward"),
    [
        ("#### 7", "7", "strict", 1.0),
        ("#### 7.00", 7, "strict", 1.0),
        ("#### 1,007", 1007.0, "strict", 1.0),
        ("It is 7", "7", "strict", 0.0),
        ("It is 7", "7", "flexible", 1.0),
        ("#### 8 and not 7", "7", "strict", 0.0),
        ("#### 7", "3 and 4 are\n#### 7", "strict", 1.0),
        ("", "7", "flexible", 0.0),
    ],
)
def test_answer_compares_numbers(text: str, truth: object, method: str, reward: float) -> None:
    assert answer(make_attempt(policy(text), task=replace(TASK, truth=truth)), method) == reward  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["#### " + "9" * 100_000, "#### nan", "#### inf", "#### 1e999999", "#### \uff17", "####"]
)
def test_hostile_answers_score_zero(text: str) -> None:
    for method in ("strict", "flexible"):
        assert answer(make_attempt(policy(text), task=replace(TASK, truth="12")), method) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["answer", "outcome"])
async def test_text_of_tools_and_feedback_is_not_the_answer(function: str) -> None:
    stop = StopReason.TOOL_DONE
    for entries in (
        (call_turn("add"), tool_entry(RIGHT)),
        (policy("I do not know"), feedback_entry(RIGHT, 0.0)),
        (call_turn("add"), tool_entry(RIGHT), policy("That is it.")),
    ):
        for method in ("strict", "flexible"):
            component = {"function": function, "args": {"method": method}}
            group = await score_group(None, [make_attempt(*entries, stop=stop).rollout], right=component)
            assert group.scored[0].components == {"right": 0.0}


def test_answer_is_the_last_turn_unless_truncated() -> None:
    assert make_attempt(policy(RIGHT), feedback_entry("No.", 0.0), policy("#### 8")).answer == "#### 8"
    truncated = replace(policy(RIGHT), finish_reason="length")
    assert make_attempt(truncated, stop=StopReason.LENGTH_TURN).answer == ""
    assert (
        make_attempt(policy(RIGHT), feedback_entry("too long to fit", 0.0), stop=StopReason.LENGTH_ROLLOUT).answer
        == RIGHT
    )
    assert make_attempt().answer == ""


@pytest.mark.parametrize("stop", [stop for stop in StopReason if not stop.is_infrastructure])
def test_outcome_is_the_feedback_or_the_answer_of_ended_rollouts(stop: StopReason) -> None:
    attempts = [
        make_attempt(policy(RIGHT), stop=stop),
        make_attempt(policy("#### 8"), stop=stop),
        make_attempt(policy(RIGHT), feedback_entry("", 1.0), task=FEEDBACK_TASK, stop=stop),
        make_attempt(
            policy("#### 8"),
            feedback_entry("No.", 0.0),
            policy(RIGHT),
            feedback_entry("", 0.5),
            task=FEEDBACK_TASK,
            stop=stop,
        ),
        make_attempt(policy("#### 8"), feedback_entry("No.", 0.0), task=FEEDBACK_TASK, stop=stop),
    ]
    ended = stop in (StopReason.DONE, StopReason.FEEDBACK_DONE, StopReason.TOOL_DONE, StopReason.STEP_DONE)
    assert [outcome(attempt) for attempt in attempts] == ([1.0, 0.0, 1.0, 0.5, 0.0] if ended else [0.0] * 5)


def test_efficiency_costs_successful_attempts_up_to_the_maximum() -> None:
    entries = (call_turn("add", "add"), tool_entry("3"), policy("7"))
    successful, failed = make_attempt(*entries, success=True), make_attempt(*entries, success=False)
    assert efficiency(successful, per_call=0.05) == -0.1
    assert efficiency(successful, per_call=0, per_turn=0.25) == -0.5
    assert efficiency(successful, per_call=0, per_token=0.125) == -0.125
    assert efficiency(successful, per_call=9, most=0.5) == -0.5
    assert efficiency(failed) == 0.0 and efficiency(failed, always=True) == -0.1
    assert math.copysign(1, efficiency(successful, per_call=0)) == 1


def test_tool_quality_counts_calls_that_the_policy_could_help() -> None:
    results = (Outcome.OK, Outcome.OK, Outcome.INVALID, Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
    attempt = make_attempt(policy("add"), tool_entry("7", *results))
    assert tool_quality(attempt) == (2 - 1) / 4
    assert tool_quality(attempt, invalid=0.5) == (2 - 0.5) / 4
    assert tool_quality(make_attempt(policy("add"), tool_entry("?", Outcome.TIMEOUT))) == 0.0


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

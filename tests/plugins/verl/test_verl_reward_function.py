"""Tests calling verl's reward functions: arguments, results, async functions and errors with their lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtrl_plugins.verl.reward_function import by_source, score_arguments
from tests.trainer.reward.attempts import TASK, call_turn, feedback_entry, make_attempt, policy, score_group, tool_entry
from tests.trainer.reward.attempts import make_rollout as make_rollout

ROW = {"data_source": "openai/gsm8k", "extra_info": {"index": 3, "split": "train"}}
TASK_WITH_ROW = replace(TASK, columns=ROW)


def test_reward_function_gets_verls_arguments() -> None:
    sample = make_attempt(
        call_turn("add"),
        tool_entry("#### 7", reward=0.5),
        policy("no"),
        feedback_entry("Try again.", 0.25),
        policy("#### 8"),
        task=TASK_WITH_ROW,
    )
    arguments = score_arguments(sample)
    assert (arguments["data_source"], arguments["ground_truth"]) == ("openai/gsm8k", "7")
    assert arguments["extra_info"]["index"] == 3
    assert arguments["extra_info"]["num_turns"] == 6
    assert arguments["extra_info"]["rollout_reward_scores"] == {"turn_scores": [0.25], "tool_rewards": [0.5]}
    assert ROW["extra_info"] == {"index": 3, "split": "train"}, "a row is not changed"


def test_solution_is_the_whole_response_with_the_mask_of_the_policys_ids_beside_it() -> None:
    sample = make_attempt(call_turn("add"), tool_entry("#### 7"), policy("I do not know."), task=TASK_WITH_ROW)
    arguments = score_arguments(sample)
    extra = arguments["extra_info"]
    assert (arguments["solution_str"], extra["policy_str"]) == ("#### 7I do not know.", "I do not know.")
    assert extra["response_ids"] == list(map(ord, "#### 7I do not know."))
    assert extra["response_mask"] == [0] * len("#### 7") + [1] * len("I do not know.")
    assert by_source(make_attempt(policy("It is #### 7"), task=TASK_WITH_ROW)) == 1.0


def test_unknown_data_source_is_reported() -> None:
    sample = make_attempt(policy("#### 7"), task=replace(TASK, columns={"data_source": "mine"}))
    with pytest.raises(NotImplementedError, match="data_source='mine'"):
        by_source(sample)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [("1", 1.0), ("True", 1.0), ("{'score': 0.5, 'acc': True}", 0.5), ("__import__('numpy').float32(2)", 2.0)],
)
async def test_results_become_numbers(returned: str, expected: float, tmp_path: Path) -> None:
    file = tmp_path / f"theirs_{abs(hash(returned))}.py"
    file.write_text(
        f"def score(data_source, solution_str, ground_truth, extra_info=None, k=None):\n    return {returned}"
    )
    args: dict[str, Any] = {"path": str(file), "name": "score", "kwargs": {"k": 1}}
    group = await score_group(
        None,
        [make_rollout(policy("a"))],
        TASK_WITH_ROW,
        custom={"function": "mtrl_plugins.verl.reward_function:custom", "args": args},
    )
    assert group.scored[0].reward == expected


async def test_async_function_is_awaited_and_its_error_reported(tmp_path: Path) -> None:
    file = tmp_path / "theirs_async.py"
    lines = ("import anyio", "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):",
             "    await anyio.lowlevel.checkpoint()", "    return {'score': {'a': 0.5}[solution_str]}")  # fmt: skip
    file.write_text("\n".join(lines))
    component = {"function": "mtrl_plugins.verl.reward_function:custom", "args": {"path": str(file)}}
    group = await score_group(
        None, [make_rollout(policy("a")), make_rollout(policy("b"))], TASK_WITH_ROW, custom=component
    )
    assert group.scored[0].reward == 0.5
    assert f"KeyError: 'b' ({file}:4)" in repr(group)

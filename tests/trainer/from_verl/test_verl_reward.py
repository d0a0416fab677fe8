"""A reward function of verl's is asked by verl's names, and about the policy's own words alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.reward.attempts import TASK, answered, attempt, calls, heard, policy, scored
from tests.trainer.reward.attempts import rollout as rolled
from trainer.verl.reward import asked, by_source, said

ROW = {"data_source": "openai/gsm8k", "extra_info": {"index": 3, "split": "train"}}
TASKED = replace(TASK, columns=ROW)


def test_it_is_given_what_verl_gives() -> None:
    one = attempt(calls("add"), answered("#### 7", reward=0.5), policy("no"), heard("Try again.", 0.25),
                  policy("#### 8"), task=TASKED)  # fmt: skip
    given = asked(one)
    assert (given["data_source"], given["ground_truth"]) == ("openai/gsm8k", "7")
    assert given["extra_info"]["index"] == 3
    assert given["extra_info"]["num_turns"] == 6
    assert given["extra_info"]["rollout_reward_scores"] == {"turn_scores": [0.0, 0.25, 0.0],
                                                            "tool_rewards": [0.5, 0.0, 0.0]}  # fmt: skip
    assert ROW["extra_info"] == {"index": 3, "split": "train"}, "a row is not changed"


def test_what_a_tool_said_is_not_taken_for_the_policys_answer() -> None:
    one = attempt(calls("add"), answered("#### 7"), policy("I do not know."), task=TASKED)
    assert "7" not in said(one) and by_source(one) == 0.0
    assert by_source(attempt(policy("It is #### 7"), task=TASKED)) == 1.0


def test_a_source_without_a_rule_is_told_by_name() -> None:
    one = attempt(policy("#### 7"), task=replace(TASK, columns={"data_source": "mine"}))
    with pytest.raises(NotImplementedError, match="data_source='mine'"):
        by_source(one)


@pytest.mark.parametrize(
    ("gives", "worth"),
    [("1", 1.0), ("True", 1.0), ("{'score': 0.5, 'acc': True}", 0.5), ("__import__('numpy').float32(2)", 2.0)],
)
async def test_whatever_such_a_function_gives_is_a_number(gives: str, worth: float, tmp_path: Path) -> None:
    file = tmp_path / f"theirs_{abs(hash(gives))}.py"
    file.write_text(f"def score(data_source, solution_str, ground_truth, extra_info=None, k=None):\n    return {gives}")
    args: dict[str, Any] = {"path": str(file), "name": "score", "kwargs": {"k": 1}}
    group = await scored(
        None, [rolled(policy("a"))], TASKED, custom={"function": "trainer.verl.reward:custom", "args": args}
    )
    assert group.scored[0].reward == worth


async def test_an_async_function_is_awaited_and_a_mistake_in_it_is_told_too(tmp_path: Path) -> None:
    file = tmp_path / "theirs_async.py"
    lines = ("import anyio", "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):",
             "    await anyio.lowlevel.checkpoint()", "    return {'score': {'a': 0.5}[solution_str]}")  # fmt: skip
    file.write_text("\n".join(lines))
    component = {"function": "trainer.verl.reward:custom", "args": {"path": str(file)}}
    group = await scored(None, [rolled(policy("a")), rolled(policy("b"))], TASKED, custom=component)
    assert group.scored[0].reward == 0.5
    assert f"KeyError: 'b' ({file}:4)" in repr(group)


async def test_a_mistake_in_it_is_told_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "theirs_wrong.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return truth")
    component = {"function": "trainer.verl.reward:custom", "args": {"path": str(file)}}
    group = await scored(None, [rolled(policy("a"))], TASKED, custom=component)
    assert f"({file}:2)" in repr(group)

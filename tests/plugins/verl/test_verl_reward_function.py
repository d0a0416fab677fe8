"""Tests calling verl's reward functions: arguments, results, async functions and errors with their lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gateway.errors import ConfigError
from mtrl_plugins.verl.reward_function import by_source, score_arguments
from tests.trainer.reward.attempts import TASK, call_turn, feedback_entry, make_attempt, policy, score_group, tool_entry
from tests.trainer.reward.attempts import make_rollout as make_rollout
from trainer.data import load_rows

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


def row(index: int, truth: str, **extra: Any) -> dict[str, Any]:
    """A row as verl's preprocessing writes it, with numpy values."""
    prompt = np.array([{"role": "user", "content": f"What is {truth}?"}], dtype=object)
    info = {
        "split": "train",
        "index": np.int64(index),
        "need_tools_kwargs": np.bool_(True),
        "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"name": "coach", "query": f"What is {truth}?", "ground_truth": truth},
        "tool_selection": np.array(["check"], dtype=object),
    }
    model = {"style": "rule", "ground_truth": truth}
    return {"data_source": "mine", "prompt": prompt, "ability": "math", "reward_model": model,
            "extra_info": info | extra}  # fmt: skip


def test_numpy_rows_are_equal_from_parquet_and_memory(tmp_path: Path) -> None:
    rows = [row(0, "2"), row(1, "3", tools_kwargs={"check": {"execute_kwargs": {"unit": np.str_("km")}}})]
    file = tmp_path / "rows.parquet"
    pd.DataFrame(rows).to_parquet(file)
    held, read = load_rows(rows), load_rows(file)
    for item, other in zip(held, read, strict=True):
        assert (item.messages, item.truth, item.session_task.tools) == (other.messages, other.truth, ("check",))
        assert dict(item.session_task.create) == dict(other.session_task.create)
        assert (item.session_task.feedback, item.session_task.feedback_args) == (
            other.session_task.feedback,
            other.session_task.feedback_args,
        )
    first, second = read
    assert first.session_task.create["check"] == {"ground_truth": "2"}
    assert second.session_task.create["check"] == {"execute_kwargs": {"unit": "km"}}
    assert (first.session_task.feedback, first.session_task.feedback_args["ground_truth"]) == ("coach", "2")
    json.dumps([dict(first.columns), first.session_task.create["check"], first.session_task.feedback_args])


def test_invalid_row_is_reported_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pd.DataFrame([row(0, "2"), row(1, "3", tools_kwargs=None, interaction_kwargs={"name": ""})]).to_parquet(file)
    with pytest.raises(ConfigError) as caught:
        load_rows(file)
    assert f"{file}:2: extra_info.interaction_kwargs.name: is an empty text" in str(caught.value)
    assert f"{file}:2: tools_kwargs: is missing, but `need_tools_kwargs` is true" in str(caught.value)

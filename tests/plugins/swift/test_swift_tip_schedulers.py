"""Tests ms-swift's schedulers that answer a wrong answer with a tip."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.swift.conversions import BUILTIN_SCHEDULERS
from mtrl_plugins.swift.schedulers import multi_turns
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import TASK, other_texts, policy_texts, run_scheduler
from trainer.rollout.rollout import StopReason
from trainer.rollout.task import Task

pytestmark = pytest.mark.anyio

PLUGIN = """
    from swift.plugin.multi_turn import MathTipsScheduler, ThinkingModelTipsScheduler, multi_turns

    def right(completions, solution):
        return [float(truth in said) for said, truth in zip(completions, solution)]

    class Within(MathTipsScheduler):
        tips_prompt = 'But no,'

        def __init__(self, *args, **kwargs):
            super().__init__(*args, acc_function=right, **kwargs)

    class After(ThinkingModelTipsScheduler):
        tips_prompt = 'No.'

        def __init__(self, *args, **kwargs):
            super().__init__(*args, acc_function=right, **kwargs)

    multi_turns['within'] = Within
    multi_turns['after'] = After
"""
NAMED = "mtrl_plugins.swift.stepper:named"


async def run_tip_scheduler(write: Write, name: str, *answers: str, task: Task = TASK, **args: Any) -> Any:
    plugins = [str(write("plugin.py", PLUGIN))]
    return await run_scheduler(NAMED, answers, task, name=name, plugins=plugins, **args)


async def test_tip_replaces_wrong_answer_within_the_turn(write: Write) -> None:
    rollout = await run_tip_scheduler(
        write, "within", "<think>3 and 4.</think><answer>8</answer>", " it is 9", max_turns=5
    )
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert policy_texts(rollout) == ["<think>3 and 4.", " it is 9"] and other_texts(rollout)[1:] == ["But no,"]
    assert rollout.infos["swift_messages"][-1]["content"] == "<think>3 and 4.But no, it is 9"


async def test_tip_after_a_turn_removes_its_thinking(write: Write) -> None:
    rollout = await run_tip_scheduler(
        write, "after", "<think>hm</think> It is 8.", "<think>so</think> It is 9.", max_turns=5
    )
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert policy_texts(rollout) == ["<think>hm</think> It is 8.", "<think>so</think> It is 9."]
    assert len(rollout.earlier) == 1
    roles = [(message["role"], message["content"]) for message in rollout.infos["swift_messages"][2:]]
    assert roles == [("assistant", "It is 8."), ("user", "No."), ("assistant", "<think>so</think> It is 9.")]


@pytest.mark.parametrize("name", ["within", "after"])
async def test_correct_answer_gets_no_tip(write: Write, name: str) -> None:
    rollout = await run_tip_scheduler(write, name, "7")
    assert (rollout.stop, policy_texts(rollout)) == (StopReason.STEP_DONE, ["7"])


async def test_missing_solution_column_is_reported(write: Write) -> None:
    rollout = await run_tip_scheduler(write, "within", "7", task=Task("t", TASK.messages))
    assert rollout.stop is StopReason.ERROR and "solution: the row has no such column" in rollout.reason
    assert "tips.py" not in rollout.reason


@pytest.mark.parametrize("name", ["math_tip_trick", "thinking_tips_scheduler"])
async def test_missing_math_verify_is_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(multi_turns) == set(BUILTIN_SCHEDULERS)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="run `pip install 'mtrl-rl\\[math\\]'`"):
        await run_scheduler(NAMED, [], name=name)

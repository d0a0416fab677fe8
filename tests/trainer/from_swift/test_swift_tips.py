"""The schedulers that come with ms-swift are there by its names: an answer that is wrong gets one tip."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.trainer.from_swift.swift_playing import TASK, others, played, trained
from trainer.flags.said import SCHEDULERS
from trainer.run.rollout import StopReason
from trainer.swift.gym import multi_turns
from trainer.task import Task

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
NAMED = "trainer.swift.stepper:named"


async def tried(write: Write, name: str, *answers: str, task: Task = TASK, **args: Any) -> Any:
    plugins = [str(write("plugin.py", PLUGIN))]
    return await played(NAMED, answers, task, name=name, plugins=plugins, **args)


async def test_a_tip_stands_in_the_turn_in_the_place_of_a_wrong_answer(write: Write) -> None:
    rollout = await tried(write, "within", "<think>3 and 4.</think><answer>8</answer>", " it is 9", max_turns=5)
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert trained(rollout) == ["<think>3 and 4.", " it is 9"] and others(rollout)[1:] == ["But no,"]
    assert rollout.infos["swift_messages"][-1]["content"] == "<think>3 and 4.But no, it is 9"


async def test_a_tip_after_a_turn_leaves_nothing_of_its_thoughts(write: Write) -> None:
    rollout = await tried(write, "after", "<think>hm</think> It is 8.", "<think>so</think> It is 9.", max_turns=5)
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert trained(rollout) == ["<think>hm</think> It is 8.", "<think>so</think> It is 9."]
    assert len(rollout.earlier) == 1
    roles = [(one["role"], one["content"]) for one in rollout.infos["swift_messages"][2:]]
    assert roles == [("assistant", "It is 8."), ("user", "No."), ("assistant", "<think>so</think> It is 9.")]


@pytest.mark.parametrize("name", ["within", "after"])
async def test_a_right_answer_gets_no_tip(write: Write, name: str) -> None:
    rollout = await tried(write, name, "7")
    assert (rollout.stop, trained(rollout)) == (StopReason.STEP_DONE, ["7"])


async def test_a_row_without_a_solution_is_told_by_its_column(write: Write) -> None:
    rollout = await tried(write, "within", "7", task=Task("t", TASK.messages))
    assert rollout.stop is StopReason.ERROR and "solution: the row has no such column" in rollout.reason
    assert "tips.py" not in rollout.reason


@pytest.mark.parametrize("name", ["math_tip_trick", "thinking_tips_scheduler"])
async def test_what_judges_by_default_is_told_where_it_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(multi_turns) == set(SCHEDULERS)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match="run `pip install math-verify`"):
        await played(NAMED, [], name=name)

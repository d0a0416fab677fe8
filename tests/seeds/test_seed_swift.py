"""Tests the examples of ms-swift's page on multi-turn training: schedulers, rewards, masks and flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from mtrl_plugins.swift import orm, schedulers
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import LIMITS, RolloutRunners, load_tasks, make_template, score_group, trained_texts
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.setup import make_stepper

ROW = {
    "messages": [
        {"role": "system", "content": "Think first, then answer."},
        {"role": "user", "content": "What is the root of 36 times the root of 16?"},
    ],
    "problem": "What is the root of 36 times the root of 16?",
    "solution": "12",
}
NAMED = "mtrl_plugins.swift.stepper:named"


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    registries = [schedulers.multi_turns, schedulers.envs, orm.orms]
    before = [dict(one) for one in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


async def played(
    stepper: str, *texts: str, row: dict[str, Any] = ROW, limits: RolloutLimits = LIMITS, **args: Any
) -> Rollout:
    found = make_stepper(BaseRolloutSettings(stepper=stepper, stepper_args=args))
    async with Gateway([]) as gateway:
        return await RolloutRunners(gateway, make_template(), limits, found).play(load_tasks(row)[0], *texts)


BASE = """
from abc import abstractmethod
from typing import Dict, Optional, Tuple, Union

from swift.llm import RolloutInferRequest
from swift.llm.infer.protocol import RolloutResponseChoice
from swift.plugin import ORM, multi_turns, orms
from swift.plugin.multi_turn import MultiTurnScheduler

SEEN = []
"""
TIPS = """

class Scheduler(MultiTurnScheduler):
    def step(
        self, infer_request: "RolloutInferRequest", result: "RolloutResponseChoice", current_turn: int
    ) -> Union["RolloutInferRequest", Tuple["RolloutInferRequest", Dict]]:
        SEEN.append((repr(infer_request.messages), infer_request.data_dict, result, current_turn))
        infer_request.messages.append({"role": "user", "content": "That is not right. Think again."})
        return infer_request, {"turns": current_turn, "last": result.message.content}


class Back(MultiTurnScheduler):
    tip = "But wait, that is not right."

    def check_finished(self, infer_request, result, current_turn):
        said = infer_request.messages[-1]["content"]
        return self.tip in said or super().check_finished(infer_request, result, current_turn)

    def step(self, infer_request, result, current_turn):
        said = infer_request.messages[-1]["content"]
        infer_request.messages[-1]["content"] = said[: said.index("</think>")] + self.tip
        return infer_request


class RewardFunction(ORM):
    def __call__(self, completions, **kwargs):
        SEEN.append((completions, sorted(kwargs)))
        infos = kwargs.get("multi_turn_infos", {})
        chats = kwargs.get("messages")
        return [info["turns"] + len(chat) / 10 for info, chat in zip(infos, chats)]


multi_turns["math_tip_trick_multi_turn"] = Scheduler
multi_turns["math_tip_trick"] = Back
orms["by_turns"] = RewardFunction


class Reward(ORM):

   def  __call__(completions, **kwargs):
        SEEN.append((completions, sorted(kwargs)))
        return [float(len(chat)) for chat in kwargs.get('messages')]


orms["without_self"] = Reward
"""


def _plugin(lay: Lay) -> Path:
    return lay({"plugin.py": BASE + TIPS}) / "plugin.py"


def _seen(file: Path) -> list[Any]:
    import sys

    assert Path(str(sys.modules["plugin"].__file__)) == file
    seen: list[Any] = sys.modules["plugin"].SEEN
    return seen


async def test_truncated_response_ends_a_rollout_by_default(lay: Lay) -> None:
    file = _plugin(lay)
    from gateway.plugins import enable_stand_ins

    with enable_stand_ins("", [file.parent]):
        scheduler: Any = type(make_stepper(BaseRolloutSettings(stepper=f"{file}:Scheduler")).scheduler)(
            None, max_turns=5
        )  # type: ignore[attr-defined]
    choice = type("Choice", (), {"finish_reason": "length"})()
    assert scheduler.check_finished(None, choice, 1) is True
    choice.finish_reason = "stop"
    assert [scheduler.check_finished(None, choice, turn) for turn in (1, 4, 5)] == [False, False, True]


async def test_step_gets_the_documented_request_and_result(lay: Lay) -> None:
    file = _plugin(lay)
    await played(f"{file}:Scheduler", "It is 6.", "It is 12.", max_turns=2)
    ((messages, columns, result, turn),) = _seen(file)
    assert messages == repr([*ROW["messages"], {"role": "assistant", "content": "It is 6."}])
    assert columns["problem"] == ROW["problem"] and columns["solution"] == "12"
    assert (result.index, result.message.role, result.message.content) == (0, "assistant", "It is 6.")
    assert (result.message.tool_calls, result.finish_reason, turn) == (None, "stop", 1)


async def test_infos_of_step_reach_the_reward_function(lay: Lay) -> None:
    file = _plugin(lay)
    args = {"name": "math_tip_trick_multi_turn", "plugins": [str(file)], "max_turns": 2}
    rollout = await played(NAMED, "It is 6.", "It is 12.", **args)
    function = {"function": "mtrl_plugins.swift.orm:named", "batched": True}
    settings = {"components": {"all": {**function, "args": {"name": "by_turns", "plugins": [str(file)]}}}}
    (one,) = (await score_group(settings, [rollout], load_tasks(ROW)[0], file.parent)).scored
    assert one.reward == 1 + 0.5, "one step was told of, and five messages are the whole chat"
    completions, keys = _seen(file)[-1]
    assert completions == ["It is 12."], "the last response alone"
    assert {"problem", "solution", "messages", "is_truncated", "multi_turn_infos"} <= set(keys)


async def test_reward_class_whose_call_lacks_self_runs_as_it_is_meant(lay: Lay) -> None:
    file = _plugin(lay)
    rollout = await played(
        NAMED, "It is 6.", "It is 12.", name="math_tip_trick_multi_turn", plugins=[str(file)], max_turns=2
    )
    function = {"function": "mtrl_plugins.swift.orm:named", "batched": True}
    settings = {"components": {"all": {**function, "args": {"name": "without_self", "plugins": [str(file)]}}}}
    (one,) = (await score_group(settings, [rollout], load_tasks(ROW)[0], file.parent)).scored
    assert one.reward == 5.0 and _seen(file)[-1][0] == ["It is 12."]


async def test_continuation_within_thinking_does_not_train_the_tip(lay: Lay) -> None:
    args = {"name": "math_tip_trick", "plugins": [str(_plugin(lay))], "max_turns": 3}
    rollout = await played(NAMED, "<think>6?</think>It is 6.", " So 12.</think>It is 12.", **args)
    used = make_template()
    text = used.tokenizer.decode(rollout.ledger.ids)
    assert "<think>6?But wait, that is not right. So 12.</think>It is 12." in text and "It is 6." not in text
    assert trained_texts(rollout, used) == ["<think>6?", " So 12.</think>It is 12.<|im_end|>"]

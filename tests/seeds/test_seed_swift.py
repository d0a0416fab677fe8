"""Tests the examples of ms-swift's page on multi-turn training: schedulers, rewards, masks and flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from mtrl_plugins.scripts.translate_command import translate_command
from mtrl_plugins.swift import orm, schedulers
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import LIMITS, RolloutRunners, load_tasks, make_template, score_group, trained_texts
from trainer.algorithms.token_weights import compute_token_weights, load_token_weight_fn
from trainer.ledger import Author
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.setup import make_stepper
from trainer.train.settings import TrainSettings

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


@pytest.mark.parametrize("turns", [2, 3])
async def test_max_turns_ends_a_rollout_by_default(turns: int, lay: Lay) -> None:
    rollout = await played(f"{_plugin(lay)}:Scheduler", "It is 6.", max_turns=turns)
    assert (rollout.stop, len(rollout.turns)) == (StopReason.STEP_DONE, turns)


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


async def test_new_round_tells_the_policy_to_think_again(lay: Lay) -> None:
    args = {"name": "math_tip_trick_multi_turn", "plugins": [str(_plugin(lay))], "max_turns": 2}
    rollout = await played(NAMED, "It is 6.", "It is 12.", **args)
    roles = [message["role"] for message in rollout.ledger.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert trained_texts(rollout, make_template()) == ["It is 6.<|im_end|>", "It is 12.<|im_end|>"]


async def test_continuation_within_thinking_does_not_train_the_tip(lay: Lay) -> None:
    args = {"name": "math_tip_trick", "plugins": [str(_plugin(lay))], "max_turns": 3}
    rollout = await played(NAMED, "<think>6?</think>It is 6.", " So 12.</think>It is 12.", **args)
    used = make_template()
    text = used.tokenizer.decode(rollout.ledger.ids)
    assert "<think>6?But wait, that is not right. So 12.</think>It is 12." in text and "It is 6." not in text
    assert trained_texts(rollout, used) == ["<think>6?", " So 12.</think>It is 12.<|im_end|>"]


FLAGS = ["--multi_turn_scheduler", "math_tip_trick_multi_turn", "--max_turns", "3", "--external_plugins", "plugin.py"]
TRAINS = [
    "swift", "rlhf", "--rlhf_type", "grpo", "--model", "models/any", "--dataset", "rows.jsonl", "--max_steps", "2",
    "--num_generations", "2", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
    "--lr_scheduler_type", "constant", "--reward_funcs", "by_turns",
]  # fmt: skip


def _settings(*words: str) -> TrainSettings:
    return TrainSettings.model_validate(translate_command([*TRAINS, *words]).settings)


def test_scheduler_and_turns_are_flags(lay: Lay) -> None:
    file = _plugin(lay)
    lay({"rows.jsonl": json.dumps(ROW)})
    found = _settings(*FLAGS)
    assert found.stepper == NAMED and found.limits.assistant_turns == 3
    assert found.stepper_args == {"name": "math_tip_trick_multi_turn", "plugins": ["plugin.py"], "max_turns": 3}
    assert make_stepper(found) is not None and file.is_file()
    single = _settings("--external_plugins", "plugin.py")
    assert single.stepper is None and single.limits.assistant_turns == 1


def test_separate_rollout_server_is_not_needed(lay: Lay) -> None:
    _plugin(lay)
    rollout = "swift rollout \\\n    --model models/any \\\n    --use_async_engine true \\\n"
    served = rollout + " \\\n".join(f"    {FLAGS[at]} {FLAGS[at + 1]}" for at in range(0, len(FLAGS), 2)) + "\n"
    learned = f"swift rlhf --vllm_mode server {' '.join(TRAINS[2:])} --external_plugins plugin.py\n"
    lay({"rows.jsonl": json.dumps(ROW), "rollout.sh": served, "train.sh": learned})
    both = TrainSettings.model_validate(translate_command(["rollout.sh", "train.sh"]).settings)
    assert (both.stepper, both.limits.assistant_turns) == (NAMED, 3)
    assert both.engine == "auto"


@pytest.mark.parametrize(
    ("flags", "learned"),
    [(FLAGS, [1, 1]), ([*FLAGS, "--loss_scale", "default"], [1, 1]), ([*FLAGS, "--loss_scale", "last_round"], [0, 1])],
    ids=["left out", "default", "last_round"],
)
async def test_loss_scale_selects_trained_rounds(flags: list[str], learned: list[int], lay: Lay) -> None:
    file = _plugin(lay)
    lay({"rows.jsonl": json.dumps(ROW)})
    settings = _settings(*flags)
    row = {**ROW, "messages": [*ROW["messages"], {"role": "assistant", "content": "Is it?"}, ROW["messages"][1]]}
    rollout = await played(f"{file}:Scheduler", "It is 6.", "It is 12.", row=row, max_turns=2)
    weighed = compute_token_weights(
        rollout.ledger, load_token_weight_fn(settings.algorithm.credit.trained_turns), "one"
    )
    starts = rollout.ledger.starts
    by_entry = [
        weighed[start : start + len(entry.ids)]
        for entry, start in zip(rollout.ledger, starts, strict=True)
        if entry.ids
    ]
    mine = [set(part) for part, entry in zip(by_entry, rollout.ledger, strict=False) if entry.author is Author.POLICY]
    assert mine == [{float(one)} for one in learned]
    others = [part for part, entry in zip(by_entry, rollout.ledger, strict=False) if entry.author is not Author.POLICY]
    assert not any(weight for part in others for weight in part), "the row's own assistant turn is never trained"


WEIGHS = """
def half_then_whole(ledger):
    turns = list(ledger.turns)
    return [
        (0.5 if entry is turns[0] else 1.0) if any(entry is turn for turn in turns) else 0.0
        for entry in ledger
        for _ in entry.ids
    ]
"""


async def test_tokens_may_have_weights(lay: Lay) -> None:
    file = _plugin(lay)
    lay({"scales.py": WEIGHS})
    rollout = await played(f"{file}:Scheduler", "It is 6.", "It is 12.", max_turns=2)
    weighed = compute_token_weights(rollout.ledger, load_token_weight_fn("scales.py:half_then_whole"), "one")
    first, second = rollout.turns
    assert sum(weighed) == 0.5 * len(first.ids) + len(second.ids)

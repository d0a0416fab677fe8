"""Tests multi-turn schedulers written for ms-swift's releases 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError
from gateway.types import Image
from mtrl_plugins.swift.orm import gym
from mtrl_plugins.swift.protocol import RolloutInferRequest
from mtrl_plugins.swift.stepper import ChatState, build_request, find_masked_spans, next_step, to_template_messages
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import ROW, TASK, other_texts, policy_texts, run_scheduler
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.reward.attempt import Attempt
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.steppers import RolloutStart
from trainer.rollout.task import Task
from trainer.setup import make_stepper

NEW_ROUND = """
    from swift.plugin import multi_turns
    from swift.plugin.multi_turn import MultiTurnScheduler
    from swift.llm import RolloutInferRequest
    from swift.llm.infer.protocol import RolloutResponseChoice
    from swift.utils import get_logger

    logger = get_logger()

    class Again(MultiTurnScheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

        def check_finished(self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn):
            assert infer_request.messages[-1] == {'role': 'assistant', 'content': result.message.content}
            if infer_request.data_dict['solution'] in result.message.content:
                return True
            return super().check_finished(infer_request, result, current_turn)

        def step(self, infer_request, result, current_turn):
            infer_request.messages.append({'role': 'user', 'content': f'No. That was {current_turn}.'})
            return GIVEN

    multi_turns['again'] = Again
"""


async def test_step_may_return_only_a_request_and_max_turns_ends_the_rollout(write: Write) -> None:
    file = write("plugin.py", NEW_ROUND.replace("GIVEN", "infer_request"))
    rollout = await run_scheduler(f"{file}:Again", ["8", "9"], max_turns=2)
    assert rollout.stop is StopReason.STEP_DONE and policy_texts(rollout) == ["8", "9"]


MASKS = """
    from swift.rollout.multi_turn import MultiTurnScheduler

    class Calls(MultiTurnScheduler):
        def check_finished(self, infer_request, response_choice, current_turn):
            return current_turn == 2

        def step(self, infer_request, response_choice, current_turn):
            ids = response_choice.token_ids
            mask = [1] * len(ids)
            mask[0] = 0
            answer = ' [it says 12]'
            infer_request.messages[-1]['content'] += answer
            more = self.tokenizer.encode(answer, add_special_tokens=False)
            ids.extend(more)
            mask.extend([1] * len(more))
            return {'infer_request': infer_request, 'response_token_ids': ids, 'response_loss_mask': mask,
                    'rollout_infos': {'answers': [answer]}}
"""


async def test_mask_only_excludes_and_foreign_ids_are_not_trained(write: Write) -> None:
    file = write("plugin.py", MASKS)
    rollout = await run_scheduler(f"{file}:Calls", ["ask 3 times 4", " so 12"])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    first, last = rollout.turns
    assert first.info[EXCLUDED_SPANS] == [[0, 1]] and EXCLUDED_SPANS not in last.info
    assert policy_texts(rollout) == ["ask 3 times 4", " so 12"]
    trained_count = sum(rollout.ledger.mask)
    assert trained_count == len(first.ids) + len(last.ids) and other_texts(rollout)[-1] == " [it says 12]"
    assert rollout.infos["answers"] == [" [it says 12]"]


HOOKS = """
    from swift.rollout import MultiTurnScheduler

    class Hooked(MultiTurnScheduler):
        async def on_trajectory_start(self, requests):
            for request in requests:
                request.messages.append({'role': 'user', 'content': f'Begin, {request.data_dict["solution"]}.'})

        async def on_turn_end(self, infer_request, response_choice, current_turn):
            return {'done': current_turn == 2, 'rollout_infos': {f'turn{current_turn}': response_choice.finish_reason}}

        async def step(self, infer_request, response_choice, current_turn):
            infer_request.messages.append({'role': 'user', 'content': 'On.'})
            return {'infer_request': infer_request}
"""


async def test_hooks_change_the_prompt_and_end_the_rollout(write: Write) -> None:
    file = write("plugin.py", HOOKS)
    rollout = await run_scheduler(f"{file}:Hooked", ["one", "two"], max_turns=9)
    assert "Begin, 7." in other_texts(rollout)[0] and policy_texts(rollout) == ["one", "two"]
    assert (rollout.infos["turn1"], rollout.infos["turn2"]) == ("stop", "stop")


RUN = """
    from copy import deepcopy
    from swift.infer_engine.protocol import RolloutOutput
    from swift.rollout.multi_turn import MultiTurnScheduler

    class Own(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            outputs = []
            for turn in range(2):
                response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
                text = response.choices[0].message.content
                infer_request.messages.append({'role': 'assistant', 'content': text})
                outputs.append(RolloutOutput(response=response, messages=deepcopy(infer_request.messages),
                                             response_token_ids=[response.choices[0].token_ids],
                                             response_loss_mask=[[turn] * len(response.choices[0].token_ids)],
                                             rollout_infos={'last': text}))
                infer_request.messages[-1]['content'] = text.rpartition(':')[2]
                infer_request.messages.append({'role': 'user', 'content': 'Again.'})
            return outputs
"""


async def test_own_run_may_replace_the_history_and_starts_a_new_ledger(write: Write) -> None:
    file = write("plugin.py", RUN)
    rollout = await run_scheduler(f"{file}:Own", ["thinking: 8", "7"])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert policy_texts(rollout) == ["thinking: 8", "7"] and len(rollout.earlier) == 1
    assert "thinking" not in other_texts(rollout)[0] and " 8" in other_texts(rollout)[0]
    first, last = rollout.turns
    assert first.info[EXCLUDED_SPANS] == [[0, len(first.ids)]] and EXCLUDED_SPANS not in last.info
    assert rollout.infos["last"] == "7"


FLAT = """
    from swift.llm.infer.protocol import RolloutOutput
    from swift.plugin.multi_turn import MultiTurnScheduler

    class Flat(MultiTurnScheduler):
        async def run(self, infer_request, request_config, **kwargs):
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            ids = response.choices[0].token_ids
            logprobs = self._extract_logprobs_from_choice(response.choices[0])
            return RolloutOutput(response=response, messages=infer_request.messages, response_token_ids=ids,
                                 response_loss_mask=[0] + [1] * (len(ids) - 1), rollout_logprobs=logprobs,
                                 rollout_infos={'logprobs': len(logprobs)})
"""


async def test_run_may_return_flat_ids_of_a_single_turn(write: Write) -> None:
    rollout = await run_scheduler(f"{write('plugin.py', FLAT)}:Flat", ["three and four"])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    (turn,) = rollout.turns
    assert turn.info[EXCLUDED_SPANS] == [[0, 1]] and rollout.infos["logprobs"] == len(turn.ids)


async def test_one_scheduler_serves_concurrent_rollouts(write: Write) -> None:
    file = write("plugin.py", NEW_ROUND.replace("GIVEN", "{'infer_request': infer_request}"))
    template, turns_so_far = make_template(HERMES), dict[str, int]()

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        turns_so_far[key] = turns_so_far.get(key, 0) + 1
        return encode_turns(template, "7" if turns_so_far[key] == 2 else f"not {key}")[0]

    stepper = make_stepper(BaseRolloutSettings(stepper=f"{file}:Again"))
    rollouts: dict[int, Rollout] = {}

    async def play(index: int) -> None:
        rollouts[index] = await runner.run(TASK, group="g", index=index)

    with anyio.fail_after(60):
        async with make_gateway() as gateway, ScriptedEngine(script) as engine:
            runner = RolloutRunner(engine, template, gateway, RolloutLimits(rollout_tokens=100_000), stepper=stepper)
            async with anyio.create_task_group() as tasks:
                for index in range(7):
                    tasks.start_soon(play, index)
    assert {index: policy_texts(rollout) for index, rollout in rollouts.items()} == {
        index: [f"not g/t/{index}", "7"] for index in range(7)
    }


SCHEDULERS = """
    from abc import ABC, abstractmethod

    class MultiTurnScheduler(ABC):
        def __init__(self, max_turns=None, *args, **kwargs):
            self.max_turns = max_turns

        @abstractmethod
        def step(self, infer_request, result, current_turn):
            pass

        def check_finished(self, infer_request, result, current_turn):
            return result.finish_reason == 'length' or bool(self.max_turns and current_turn >= self.max_turns)

    class Again(MultiTurnScheduler):
        def step(self, infer_request, result, current_turn):
            infer_request.messages.append({'role': 'user', 'content': f'Again, {current_turn}.'})
            return infer_request, {'tries': current_turn}

    class Wrong(Again):
        def check_finished(self, turn_and_more, result):
            return False

    class Short:
        def check_finished(self):
            return True

        def step(self, turn):
            return None
"""


async def test_scheduler_on_its_own_base_class_runs(write: Write) -> None:
    file = write("plugin.py", SCHEDULERS)
    rollout = await run_scheduler(f"{file}:Again", ["8", "9"], max_turns=2)
    assert policy_texts(rollout) == ["8", "9"] and rollout.stop is StopReason.STEP_DONE
    assert rollout.infos["tries"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"plugin\.py:\d+: stepper: Wrong\.check_finished too many positional arguments"),
        ("Short", r"check_finished too many positional arguments"),
    ],
)
def test_scheduler_with_other_parameters_is_refused_when_it_is_loaded(write: Write, name: str, message: str) -> None:
    file = write("plugin.py", SCHEDULERS)
    with pytest.raises(ConfigError, match=message) as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:{name}"))
    assert "define check_finished(self, " in str(caught.value)


ENV = """
    from swift.plugin import Env, envs, ContextManager, context_managers
    from swift.llm import RolloutInferRequest

    class Counts(Env):
        def __init__(self, env_config):
            super().__init__(env_config)
            self.left = env_config['turns']

        async def reset(self, config: RolloutInferRequest):
            self.truth = config.data_dict['solution']
            return f'Say {self.truth}.', {'begun': True}, 'Play.'

        async def step(self, action):
            self.left -= 1
            right = self.truth in action[-1]['content']
            return f'{self.left} left.', float(right), right or not self.left, {'said': action[-1]['content']}

        async def close(self):
            with open('closed', 'a') as file:
                file.write('x')

    class LastTwo(ContextManager):
        def manage_context(self, history, trajectory_id):
            return history[:1] + history[-2:]

    envs['counts'] = Counts
    context_managers['last_two'] = LastTwo
"""
NAMED = "mtrl_plugins.swift.stepper:named"


def read_closed() -> str:
    return Path("closed").read_text()


def task(**columns: object) -> Task:
    return replace(TASK, columns=ROW | {"env_config": {"name": "counts", "turns": 3}} | columns)


async def test_environment_answers_and_rewards_every_turn_and_is_closed(write: Write) -> None:
    file = write("plugin.py", ENV)
    rollout = await run_scheduler(NAMED, ["8", "7"], task(), name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert (
        "Play." in other_texts(rollout)[0]
        and "Say 7." in other_texts(rollout)[0]
        and "2 left." in other_texts(rollout)[1]
    )
    assert policy_texts(rollout) == ["8", "7"] and rollout.infos["step_rewards"] == [0.0, 1.0]
    assert [info.get("said") for info in rollout.infos["trajectory_info"]] == [None, "8", "7"]
    assert gym(Attempt(TASK, rollout)) == 1.0 and read_closed() == "x"


async def test_truncated_turn_and_those_within_a_limit_are_rewarded_and_environment_closed(write: Write) -> None:
    file = write("plugin.py", ENV)
    answers = [encode_turns(make_template(HERMES), "7 and more than fits", end=False)[0]]
    limits = RolloutLimits(turn_tokens=1, rollout_tokens=100_000)
    rollout = await run_scheduler(NAMED, answers, task(), limits, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.LENGTH_TURN
    assert rollout.infos["total_reward"] == float("7" in policy_texts(rollout)[0]) and read_closed() == "x"
    limits = RolloutLimits(assistant_turns=1, rollout_tokens=100_000)
    rollout = await run_scheduler(NAMED, ["8"], task(), limits, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.ASSISTANT_TURNS
    assert rollout.infos["total_reward"] == 0.0 and read_closed() == "xx"


async def test_managed_context_starts_new_ledgers_and_all_turns_are_trained(write: Write) -> None:
    file = write("plugin.py", ENV)
    row = task(ctx_config={"name": "last_two"})
    rollout = await run_scheduler(NAMED, ["8", "9", "7"], row, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert policy_texts(rollout) == ["8", "9", "7"] and len(rollout.earlier) == 2
    assert "Say 7." not in other_texts(rollout)[0] and "1 left." in other_texts(rollout)[0]


async def test_unknown_environment_is_reported_with_registered_ones(write: Write) -> None:
    file = write("plugin.py", ENV)
    row = task(env_config={"name": "count"})
    rollout = await run_scheduler(NAMED, [], row, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.ERROR and "unknown environment 'count'" in rollout.reason
    assert "did you mean 'counts'" in rollout.reason


HEAD = """
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
class Wrong(MultiTurnScheduler):
"""
STEP = "    def step(self, infer_request, result, current_turn):\n"
STEPS = {
    "raises": (STEP + "        return 1 / 0\n", "ZeroDivisionError", 5),
    "misspells": (STEP + "        return self.infer_enigne\n", "'Wrong' object has no attribute 'infer_enigne'", 5),
    "gives nothing": (STEP + "        pass\n", "`step` returned None", 4),
    "masks": (
        STEP + "        return {'infer_request': infer_request, "
        "'response_token_ids': [1], 'response_loss_mask': [1, 0]}\n", "2 numbers for 1 `response_token_ids`", 4,
    ),
    "run gives nothing": (
        "    async def run(self, infer_request, request_config):\n        pass\n", "returned None", 4,
    ),
    "asks twice": (
        "    async def run(self, infer_request, request_config):\n        import asyncio\n        return await "
        "asyncio.gather(*[self.infer_engine.infer_async(infer_request, request_config) for _ in range(2)])\n",
        "requests two turns at once", 4,
    ),
    "samples otherwise": (
        "    async def run(self, infer_request, request_config):\n        from dataclasses import replace\n"
        "        await self.infer_engine.infer_async(infer_request, replace(request_config, temperature=0.1))\n",
        "changes its `request_config`", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, expected, line", STEPS.values(), ids=STEPS)
async def test_scheduler_error_is_reported_with_its_line(write: Write, text: str, expected: str, line: int) -> None:
    file = write("plugin.py", HEAD + text)
    rollout = await run_scheduler(f"{file}:Wrong", ["8", "9"])
    assert rollout.stop is StopReason.ERROR
    assert expected in rollout.reason and f"{file}:{line}" in rollout.reason, rollout.reason


IMPORTS = {
    "from swift.plugin.multi_turn import MultiTurnSchedular": ("MultiTurnScheduler", 1),
    "import swift.megatron": ("swift.rollout", 1),
    "\nfrom swift.loss_scale import LossScale": ("`algorithm.credit.trained_turns`", 2),
    "from swift.plugin import (": ("SyntaxError", 1),
}


@pytest.mark.parametrize("text", IMPORTS)
def test_unavailable_import_is_reported_with_its_line_and_alternatives(write: Write, text: str) -> None:
    expected, line = IMPORTS[text]
    file = write("plugin.py", text + "\n")
    with pytest.raises(ConfigError) as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Any"))
    assert expected in str(caught.value) and f"{file}:{line}" in str(caught.value)
    assert "SyntaxError" in str(caught.value) or "install ms-swift" in str(caught.value)


def test_unregistered_scheduler_is_reported_with_closest_name(write: Write) -> None:
    file = write("plugin.py", HEAD + "    pass\nmulti_turns['wrong_one'] = Wrong\n")
    args = {"plugins": [str(file)], "name": "wrong_on"}
    with pytest.raises(ConfigError, match="unknown scheduler 'wrong_on'") as caught:
        make_stepper(BaseRolloutSettings(stepper="mtrl_plugins.swift.stepper:named", stepper_args=args))
    assert str(file) in str(caught.value) and "did you mean 'wrong_one'" in str(caught.value)


def test_failing_scheduler_init_is_reported_with_its_line(write: Write) -> None:
    file = write("plugin.py", HEAD + "    def __init__(self, *args, **kwargs):\n        raise KeyError('url')\n")
    with pytest.raises(ConfigError, match="Wrong cannot be instantiated: KeyError: 'url'") as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Wrong"))
    assert f"{file}:5" in str(caught.value)


def test_unavailable_class_reports_alternative_when_used(write: Write) -> None:
    file = write("plugin.py", """
        from swift.llm import PtEngine, RequestConfig, Template, to_device
        from swift.plugin.rm_plugin import DefaultRMPlugin
        class Mine(DefaultRMPlugin):
            pass
        class Uses:
            def __init__(self):
                PtEngine('model')
            def check_finished(self, turn): pass
            def step(self, turn): pass
        """)  # fmt: skip
    with pytest.raises(NotImplementedError, match="call another model over HTTP"):
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Uses"))


CHAT = [{"role": "user", "content": "Go."}]
PIECES = ("ab", "c", "def", " ", "\n")


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[id] for id in ids)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).map(tuple), st.data())
def test_kept_ids_and_insert_give_the_schedulers_text(ids: tuple[int, ...], data: st.DataObject) -> None:
    text = decode(ids)
    kept = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", "no", "cd", " "]))
    request = RolloutInferRequest([*CHAT, {"role": "assistant", "content": kept or " "}])
    state, step = next_step(ChatState(CHAT, 0, "", text, ids), request, decode)
    assert step.keep_ids is not None and decode(ids[: step.keep_ids]) + step.insert == (kept or " ")
    assert state.prefix == (kept or " ") and not step.messages and step.history is None


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=4), st.data())
def test_masks_apply_only_to_policy_turns(turns: list[tuple[int, ...]], data: st.DataObject) -> None:
    masks = [data.draw(st.lists(st.booleans(), min_size=len(turn), max_size=len(turn))) for turn in turns]
    returned: list[tuple[int, bool]] = []
    for turn, mask in zip(turns, masks, strict=True):
        returned += [*zip(turn, mask, strict=True), (9, data.draw(st.booleans()))]
    spans = find_masked_spans(turns, returned, frozenset())
    for turn, mask, turn_spans in zip(turns, masks, spans, strict=True):
        is_masked = [any(start <= place < stop for start, stop in turn_spans) for place in range(len(turn))]
        assert is_masked == [not is_trained for is_trained in mask]


def test_images_are_placed_at_their_marks() -> None:
    picture = Image(b"\x89PNG", "image/png")
    part = {"type": "image", "image": picture}
    task = Task("t", ({"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]},))
    opening = RolloutStart("k", task, (), None, RolloutLimits(), Sampling(), None)  # type: ignore[arg-type]
    request = build_request(opening)
    assert request.messages == [{"role": "user", "content": "<image>What is it?"}]
    assert request.images == ["data:image/png;base64,iVBORw=="]
    request.messages += [{"role": "assistant", "content": "zoom"}, {"role": "user", "content": "Here: <image>."}]
    request.images.append("data:image/png;base64,AAAA")
    before = ChatState([{"role": "user", "content": "<image>What is it?"}], 1, "", "zoom", (1,))
    _, step = next_step(before, request, decode)
    new = {"type": "image", "image": "data:image/png;base64,AAAA"}
    text = [{"type": "text", "text": "Here: "}, new, {"type": "text", "text": "."}]
    assert (
        step.messages
        == ({"role": "user", "content": text},)
        == to_template_messages(request.messages[2:], request.images[1:])
    )

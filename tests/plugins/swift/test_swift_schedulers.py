"""Tests multi-turn schedulers written for ms-swift's releases 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import TASK, other_texts, policy_texts, run_scheduler
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout, StopReason
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.setup import make_stepper

pytestmark = pytest.mark.anyio

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

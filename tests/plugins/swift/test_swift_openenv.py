"""Tests of ms-swift's OpenEnv scheduler: actions, observations, rewards, closing, and what subclasses override."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrl_plugins.swift.orm import gym
from mtrl_plugins.swift.schedulers import OpenEnvScheduler
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import ROW, TASK, other_texts, policy_texts, run_scheduler
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import StopReason

pytestmark = pytest.mark.anyio

SCHEDULER = """
    import asyncio
    from swift.rollout.multi_turn import Messages, OpenEnvScheduler, multi_turns

    class Counter:
        def __init__(self, config):
            self.left = config['turns']

        def reset(self):
            return {'left': self.left}, None

        def step(self, action):
            self.left -= 1
            return {'left': self.left}, float('answer' in action), not self.left, None

        def close(self):
            with open('closed', 'a') as file:
                file.write('x')

    class Counting(OpenEnvScheduler):
        env_config_defaults = {'turns': 2}

        def _create_env(self, env_config):
            return Counter(env_config)

    class Shouting(Counting):
        def parse_action(self, text):
            return None if text == 'nonsense' else {'answer': text}

        def format_observation(self, observation):
            return f"LEFT: {observation['left']}"

        async def on_turn_end(self, infer_request, response_choice, current_turn):
            uuid = infer_request.uuid
            action = self.parse_action(response_choice.message.content)
            if action is None:
                self._total_rewards[uuid] = self._total_rewards.get(uuid, 0.0) - 1.0
                infos = {'total_reward': self._total_rewards[uuid], 'gym_done': True}
                await self._close_and_remove(uuid)
                return {'done': True, 'rollout_infos': infos}
            observation, reward, done, _ = await asyncio.to_thread(self._envs[uuid].step, action)
            self._total_rewards[uuid] += reward
            self._pending_obs[uuid] = None if done else self.format_observation(observation)
            return {'done': done, 'rollout_infos': {'total_reward': self._total_rewards[uuid]}}

    multi_turns['counting'] = Counting
"""


def read_closed() -> str:
    return Path("closed").read_text()


async def test_environment_gets_actions_and_its_rewards_are_summed(write: Write) -> None:
    file = write("plugin.py", SCHEDULER)
    task = replace(TASK, columns=ROW | {"env_config": {"system_message": "Count."}})
    rollout = await run_scheduler(f"{file}:Counting", ['{"answer": 1}', "hm"], task)
    assert policy_texts(rollout) == ['{"answer": 1}', "hm"] and rollout.stop is StopReason.STEP_DONE
    assert '{"left": 2}' in other_texts(rollout)[0] and '{"left": 1}' in other_texts(rollout)[1]
    assert "Count." in other_texts(rollout)[0]
    assert (rollout.infos["step_rewards"], rollout.infos["gym_done"]) == ([1.0, 0.0], True)
    assert gym(Attempt(task, rollout)) == 1.0
    assert read_closed() == "x"


async def test_subclass_overrides_parsing_formatting_and_hooks(write: Write) -> None:
    file = write("plugin.py", SCHEDULER)
    rollout = await run_scheduler(f"{file}:Shouting", ["one", "two"])
    assert "LEFT: 1" in other_texts(rollout)[1] and rollout.infos["total_reward"] == 2.0
    rollout = await run_scheduler(f"{file}:Shouting", ["nonsense"])
    assert rollout.infos["total_reward"] == -1.0 and read_closed() == "xx"


async def test_environment_is_closed_when_a_limit_ends_the_rollout(write: Write) -> None:
    file = write("plugin.py", SCHEDULER)
    rollout = await run_scheduler(f"{file}:Counting", ["hm"], max_turns=1)
    assert rollout.infos["step_rewards"] == [0.0] and read_closed() == "x"


async def test_missing_openenv_is_reported_with_a_remedy() -> None:
    rollout = await run_scheduler("mtrl_plugins.swift.stepper:named", ["hm"], name="openenv_scheduler")
    assert rollout.stop is StopReason.ERROR and "pip install openenv" in rollout.reason


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"answer": 7}', {"answer": 7}),
        ('```json\n{"answer": 7}\n```', {"answer": 7}),
        ("[1]", {"message": "[1]"}),
        (" I think 7 ", {"message": "I think 7"}),
        ("```", {"message": "```"}),
        ("", {"message": ""}),
    ],
)
def test_action_is_the_json_object_in_a_text_or_the_text(text: str, action: dict[str, object]) -> None:
    assert OpenEnvScheduler().parse_action(text) == action

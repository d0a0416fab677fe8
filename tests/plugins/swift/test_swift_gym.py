"""Tests gym environments written for ms-swift: answers, rewards, context managers, closing and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrl_plugins.swift.orm import gym
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import ROW, TASK, other_texts, policy_texts, run_scheduler
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task

pytestmark = pytest.mark.anyio

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

"""Environments written for ms-swift answer the policy, reward its turns, and are closed whatever ends a rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Write
from tests.trainer.conversations import template_for
from tests.trainer.from_swift.swift_playing import ROW, TASK, others, played, trained
from tests.trainer.scripts import HERMES, says
from trainer.config import RolloutLimits
from trainer.reward.attempt import Attempt
from trainer.run.rollout import StopReason
from trainer.swift.reward import gym
from trainer.task import Task

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
NAMED = "trainer.swift.stepper:named"


def closed() -> str:
    return Path("closed").read_text()


def task(**columns: object) -> Task:
    return replace(TASK, columns=ROW | {"env_config": {"name": "counts", "turns": 3}} | columns)


async def test_an_environment_answers_and_rewards_every_turn_and_is_closed(write: Write) -> None:
    file = write("plugin.py", ENV)
    rollout = await played(NAMED, ["8", "7"], task(), name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert "Play." in others(rollout)[0] and "Say 7." in others(rollout)[0] and "2 left." in others(rollout)[1]
    assert trained(rollout) == ["8", "7"] and rollout.infos["step_rewards"] == [0.0, 1.0]
    assert [info.get("said") for info in rollout.infos["trajectory_info"]] == [None, "8", "7"]
    assert gym(Attempt(TASK, rollout)) == 1.0 and closed() == "x"


async def test_a_turn_that_is_cut_off_is_still_rewarded_and_the_environment_closed(write: Write) -> None:
    file = write("plugin.py", ENV)
    answers = [says(template_for(HERMES), "7 and more than fits", end=False)[0]]
    limits = RolloutLimits(turn_tokens=1, rollout_tokens=100_000)
    rollout = await played(NAMED, answers, task(), limits, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.LENGTH_TURN
    assert rollout.infos["total_reward"] == float("7" in trained(rollout)[0]) and closed() == "x"


async def test_a_limit_of_ours_ends_it_with_what_was_rewarded_so_far(write: Write) -> None:
    file = write("plugin.py", ENV)
    limits = RolloutLimits(assistant_turns=1, rollout_tokens=100_000)
    rollout = await played(NAMED, ["8"], task(), limits, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.ASSISTANT_TURNS
    assert rollout.infos["total_reward"] == 0.0 and closed() == "x"


async def test_a_context_that_is_managed_is_another_history_and_every_turn_is_learned_from(write: Write) -> None:
    file = write("plugin.py", ENV)
    row = task(ctx_config={"name": "last_two"})
    rollout = await played(NAMED, ["8", "9", "7"], row, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.STEP_DONE, rollout.reason
    assert trained(rollout) == ["8", "9", "7"] and len(rollout.earlier) == 2
    assert "Say 7." not in others(rollout)[0] and "1 left." in others(rollout)[0]


async def test_an_environment_that_nobody_registers_is_told_with_those_that_are(write: Write) -> None:
    file = write("plugin.py", ENV)
    row = task(env_config={"name": "count"})
    rollout = await played(NAMED, [], row, name="gym_scheduler", plugins=[str(file)])
    assert rollout.stop is StopReason.ERROR and "there is no environment 'count'" in rollout.reason
    assert "there are counts" in rollout.reason

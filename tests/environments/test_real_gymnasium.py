"""Gymnasium: 200 scripted episodes, 64 at once, are those that it plays alone."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.environments.real_environments import EPISODES, REFERENCE_S, play_all, python_of, run_reference
from tests.plugins.environments.environment_runs import act, observations, open_run, rewards

REFERENCE = Path(__file__).parents[1] / "mtrl_plugins/environments/gymnasium_reference.py"
STEPS = 20
NAMES: dict[str, list[Any]] = {
    "FrozenLake-v1": ["left", "down", "right", "up"],
    "CliffWalking-v1": ["up", "right", "down", "left"],
    "Taxi-v4": ["south", "north", "east", "west", "pick up", "drop off"],
    "Blackjack-v1": ["stick", "hit"],
    "CartPole-v1": [0, 1],
}
"""Environments with their actions, as the policy writes them, in their order."""


@pytest.mark.parametrize("name", NAMES)
async def test_episodes_are_those_of_gymnasium_alone(name: str) -> None:
    draw, count = Random(name), EPISODES // len(NAMES)
    scripts = [(seed, [draw.randrange(len(NAMES[name])) for _ in range(STEPS)]) for seed in range(count)]
    expected = await run_reference("gymnasium", REFERENCE, name, job=scripts)
    async with open_run(f"gymnasium:{name}", REFERENCE_S, python=python_of("gymnasium"), n_tasks=count) as runs:
        turns = [(seed, [*(act(NAMES[name][action]) for action in actions), "I stop."]) for seed, actions in scripts]
        rollouts = await play_all(runs, turns)
        again = await play_all(runs, turns[: count // 4])
    assert len(rollouts) == count
    assert [rewards(rollout) for rollout in rollouts] == [episode["rewards"] for episode in expected]
    ended = [rollout.infos["environment"] for rollout in rollouts]
    for key in ("terminated", "truncated"):
        assert [info[key] for info in ended] == [episode[key] for episode in expected]
    assert [info["return"] for info in ended] == pytest.approx([sum(each["rewards"]) for each in expected])
    seen = [observations(rollout) for rollout in rollouts]
    assert [observations(rollout) for rollout in again] == seen[: len(again)]
    assert len({str(episode) for episode in seen}) > count // 4

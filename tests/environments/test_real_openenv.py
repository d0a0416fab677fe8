"""OpenEnv: 200 scripted episodes of its own server, 64 at once, are those that its own client plays."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.environments.real_environments import EPISODES, REFERENCE_S, open_vault, play_all, run_reference
from tests.plugins.environments.environment_runs import observations, open_run, rewards
from tests.trainer.policy_scripts import render_calls
from trainer.rollout.rollout import Rollout

REFERENCE = Path(__file__).with_name("openenv_reference.py")
STEPS = 12
CALLED = {"type": "call_tool", "tool_name": "guess"}


@pytest.mark.parametrize("has_tools", [False, True], ids=["fields", "tools"])
async def test_episodes_are_those_of_openenvs_own_client(has_tools: bool) -> None:
    count = EPISODES // 2
    draw = Random(str(has_tools))
    fields = [
        (seed, [{"number": draw.randint(1, 20), "loudly": draw.random() < 0.5} for _ in range(STEPS)])
        for seed in range(count)
    ]
    if has_tools:
        fields = [(seed, [{"number": guess["number"]} for guess in guesses]) for seed, guesses in fields]
    job = [(seed, [CALLED | {"arguments": one} if has_tools else one for one in each]) for seed, each in fields]
    name = "guess" if has_tools else "step"
    scripts = [(seed, [*(render_calls((name, one)) for one in each), "I stop."]) for seed, each in fields]
    async with open_vault(has_tools=has_tools) as (_, url):
        expected = await run_reference("openenv", REFERENCE, url, job=job)
        async with open_run(f"openenv:{url}", REFERENCE_S, n_tasks=count, timeout_s=120) as runs:
            rollouts = await play_all(runs, scripts)
            again = await play_all(runs, scripts[:20])
    assert [rewards(rollout) for rollout in rollouts] == [episode["rewards"] for episode in expected]
    ended = [rollout.infos["environment"]["terminated"] for rollout in rollouts]
    assert ended == [episode["done"] for episode in expected]
    assert 0 < sum(ended) < count
    for rollout, episode in zip(rollouts, expected, strict=True):
        assert hints(rollout) == [hint(observation, has_tools) for observation in episode["observations"][1:]]
    assert [observations(rollout) for rollout in again] == [observations(rollout) for rollout in rollouts[:20]]


def hint(observation: dict[str, Any], has_tools: bool) -> str:
    """What an observation says, as OpenEnv's client has it."""
    if has_tools:
        return str(observation["result"]["data"])
    return f'{{"hint": "{observation["hint"]}", "tries": {observation["tries"]}}}'


def hints(rollout: Rollout) -> list[str]:
    """The same, as the policy read it."""
    return [text.partition("\n")[0] for text in observations(rollout)[1:]]

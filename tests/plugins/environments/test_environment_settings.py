"""`environment: FRAMEWORK:NAME` in a run file: what it sets, which tasks it makes, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.environments.episodes import read_episode
from tests.conftest import Write
from tests.plugins.environments.environment_runs import make_settings, open_run
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutSettings
from trainer.setup import load_data
from trainer.train.settings import TrainSettings


def read(**values: Any) -> TrainSettings:
    return TrainSettings.model_validate({"model": "mine", **values})


def test_short_name_sets_tasks_reward_limits_and_evaluation() -> None:
    settings = read(environment={"name": "gymnasium:FrozenLake-v1", "max_steps": 10}, limits={"turn_tokens": 64})
    assert (settings.data, settings.evaluation.data) == ("environment", "environment:eval")
    assert settings.reward.components["environment"].function == "tools"
    assert (settings.limits.assistant_turns, settings.limits.turn_tokens) == (18, 64)
    assert read(environment="textarena:Nim-v0").reward.components["environment"].function == "feedback"
    assert read(environment="verifiers:my_shop") == read(environment={"name": "verifiers:my_shop"})
    settings = read(environment="textarena:Nim-v0", reward={"success_at": 70})
    assert settings.reward.success_at == 70 and [*settings.reward.components] == ["environment"]
    rollouts = RolloutSettings.model_validate({"model": "m", "out": "o", "environment": "openenv:ws://h:1"})
    assert rollouts.data == "environment"


def test_settings_are_the_same_after_they_were_saved() -> None:
    settings = read(environment={"name": "textarena:Nim-v0", "opponent": ["[1]"]}, data="mine.jsonl")
    assert TrainSettings.model_validate(json.loads(settings.model_dump_json())) == settings
    assert settings.data == "mine.jsonl"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"environment": "gym:FrozenLake-v1"}, "openenv:URL, verifiers:PACKAGE or harbor:FOLDER"),
        ({"environment": "gymnasium:"}, "should be gymnasium:NAME"),
        ({"environment": "openenv:localhost:8000"}, "should be the server's address"),
        ({"environment": {"name": "gymnasium:A", "max_step": 3}}, "environment.max_step"),
        ({"environment": "gymnasium:A", "tools": "my_tools"}, "`tools` and `environment` exclude each other"),
        ({"environment": "gymnasium:A", "stepper": "mine:x"}, "`stepper` and `environment` exclude each other"),
    ],
)
def test_what_a_run_file_cannot_mean_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read(**values)


def test_tasks_are_seeds_and_held_out_ones_are_others() -> None:
    settings = make_settings("gymnasium:A-v0", n_tasks=3, n_eval_tasks=2, first_seed=5, prompt="Play.")
    train, held_out = load_data(settings, "environment"), load_data(settings, "environment:eval")
    assert [(task.id, read_episode(task)[0]) for task in train] == [("train-5", 5), ("train-6", 6), ("train-7", 7)]
    assert not {read_episode(task)[0] for task in train} & {read_episode(task)[0] for task in held_out}
    assert len(held_out) == 2 and train[0].messages == ({"role": "user", "content": "Play."},)
    with pytest.raises(ConfigError, match="has no split 'test'"):
        load_data(settings, "environment:test")
    with pytest.raises(ConfigError, match="reach the seeds of held-out tasks"):
        load_data(make_settings("gymnasium:A-v0", first_seed=10**9), "environment")


async def test_rows_of_a_file_choose_seeds_and_options(write: Write) -> None:
    rows = [
        {"prompt": "Echo.", "environment": {"seed": 3, "options": {"options": {"map": 1}}}},
        {"id": "mine", "prompt": "Echo."},
        {"id": "bad", "prompt": "Echo.", "environment": {"seed": -1}},
    ]
    write("rows.jsonl", "\n".join(map(json.dumps, rows)))
    async with open_run("gymnasium:sample_gym:Echo-v0") as runs:
        runs.tasks = load_data(runs.settings, "rows.jsonl")
        chosen, derived, bad = [await runs.run("I stop.", row=row) for row in range(3)]
        again = await runs.run("I stop.", row=1, index=1)
    assert chosen.ledger.messages[0]["content"].endswith("{'map': 1}")
    assert derived.ledger.messages[0] == again.ledger.messages[0] != chosen.ledger.messages[0]
    assert bad.stop is StopReason.TOOL_FAILED and "is no whole number from 0 on" in bad.reason

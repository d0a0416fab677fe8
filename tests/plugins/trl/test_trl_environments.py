"""Environments: state over a rollout, observations, rewards of their own, and use by one rollout after another."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.plugins.trl.scripted_grpo import Recorder, Safe, make_trainer, price, script_policy
from tests.trainer.policy_scripts import render_calls

ROWS = [{"prompt": [{"role": "user", "content": "Open it."}], "code": 7}] * 2
DIAL = render_calls(("dial", {"number": 7}))

pytestmark = pytest.mark.usefixtures("place")


def answers(completion: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in completion if message["role"] == "tool"]


def test_an_environment_that_owns_rewards_and_tasks_needs_neither_functions_nor_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = script_policy(monkeypatch, [[DIAL, DIAL, "Open."], ["No."], ["No."], ["No."]])
    output = make_trainer(model, None, None, environment_factory=Safe).train()
    assert output.metrics["reward/mean"] == output.metrics["reward/Safe"] == 0.5
    assert len(engines[0].requests) == 6
    with pytest.raises(ConfigError, match="train_dataset: is missing"):
        make_trainer(model, None, Recorder())
    with pytest.raises(ConfigError, match="set max_steps"):
        make_trainer(model, None, None, environment_factory=Safe, args={"max_steps": -1})


def test_environments_are_used_again_after_their_rollouts_were_scored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_policy(monkeypatch, [[DIAL, "Open."]])
    Safe.made = 0
    recorder = Recorder()
    make_trainer(model, ROWS, recorder, environment_factory=Safe, args={"max_steps": 3}).train()
    assert Safe.made == 4
    environments = [each for call in recorder.calls for each in call["environments"]]
    assert len(environments) == 12 and all(len(each.rows) == 3 for each in environments)


def test_a_column_chooses_among_environments_and_only_its_tools_are_offered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Door:
        def reset(self, **row: Any) -> None:
            assert "environment" not in row
            self.knocks = 0

        async def knock(self, times: int) -> str:
            """Knocks."""
            self.knocks += times
            return f"{self.knocks} knocks"

        async def get_reward(self) -> float:
            return float(self.knocks)

    knock, dial = render_calls(("knock", {"times": 2}), ("knock", {"times": 1})), DIAL
    script_policy(monkeypatch, [[knock, "done"], [dial, "done"], [render_calls(("price", {"item": "pear"})), "done"]])
    recorder = Recorder()
    prompt = [{"role": "user", "content": "Go in."}]
    rows = [{"prompt": prompt, "environment": "door"}, {"prompt": prompt, "environment": "safe"}]
    factories = {"door": Door, "safe": Safe}
    args = {"per_device_train_batch_size": 6, "num_generations": 3}
    trainer = make_trainer(model, rows, recorder, environment_factory=factories, tools=[price], args=args)
    trainer.train()
    by_name = {call["environment"][0]: call for call in recorder.calls}
    knocked, dialled, priced = by_name["door"]["completions"]
    assert answers(knocked) == ["2 knocks", "3 knocks"] and answers(priced) == ["3"]
    assert "no tool named 'dial'" in answers(dialled)[0]
    assert answers(by_name["safe"]["completions"][1]) == ["click"]
    assert [type(each).__name__ for each in by_name["door"]["environments"]] == ["Door"] * 3
    with pytest.raises(ConfigError, match=r"train_dataset\[0\]: environment: is missing"):
        make_trainer(model, ROWS, recorder, environment_factory=factories)
    with pytest.raises(ConfigError, match="'gate' is no environment"):
        make_trainer(model, [rows[0] | {"environment": "gate"}], recorder, environment_factory=factories)


def test_methods_run_where_reset_runs_in_the_thread_that_trains(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Place:
        def __init__(self) -> None:
            threads.append(threading.current_thread())

        def reset(self, **row: Any) -> None:
            threads.append(threading.current_thread())

        def look(self) -> str:
            """Looks."""
            threads.append(threading.current_thread())
            return "a wall"

        def get_reward(self) -> float:
            threads.append(threading.current_thread())
            return 1.0

    script_policy(monkeypatch, [[render_calls(("look", {})), "done"]])
    make_trainer(model, ROWS, None, environment_factory=Place).train()
    assert {*threads} == {threading.main_thread()} and len(threads) == 16


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (lambda: object(), "has no method `reset`"),
        ({"a": 3}, "pass a class or a function"),
        (type("Odd", (), {"reset": lambda self: None, "look": lambda self, *args: ""}), "cannot be a tool"),
    ],
)
def test_what_is_no_environment_is_refused(factory: Any, problem: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_trainer(model, ROWS, Recorder(), environment_factory=factory)


def test_a_stepper_cannot_stand_beside_environments(model: Path) -> None:
    trainer = make_trainer(model, ROWS, None, environment_factory=Safe, settings={"stepper": "x:y"})
    with pytest.raises(ConfigError, match="cannot be combined with environments"):
        trainer.train()

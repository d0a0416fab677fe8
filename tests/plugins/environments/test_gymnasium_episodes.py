"""Environments of the real Gymnasium: actions become calls, observations text and images, rewards are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError
from gateway.types import Image
from mtrl_plugins.environments.host_process import MAX_STARTS, get_host, stop_hosts
from mtrl_plugins.environments.settings import EnvironmentSettings
from tests.conftest import Write
from tests.plugins.environments.environment_runs import GYM_PYTHON, act, make_settings, observations, open_run, rewards
from tests.trainer.policy_scripts import render_calls
from tests.waiting import wait_until
from trainer.cli import app
from trainer.rollout.rollout import StopReason
from trainer.setup import make_gateway

ADAPTERS = Path(__file__).parents[3] / "mtrl_plugins/environments"
REFERENCE = Path(__file__).with_name("gymnasium_reference.py")
ACTIONS = {"FrozenLake-v1": 4, "Blackjack-v1": 2}


async def test_actions_are_calls_and_rewards_are_shown_with_each_step() -> None:
    async with open_run("gymnasium:FrozenLake-v1", args={"is_slippery": False}) as lake:
        route = ["down", "down", "right", "right", "down", "right"]
        rollout = await lake.run(*map(act, route))
        group = await lake.score(rollout)
    first, *later = observations(rollout)
    assert first.endswith("until the episode is over.\n\n0\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert later[0] == "4\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\nreward: 0"
    assert later[-1].endswith("[G]\nreward: 1\nThe episode is over: it has ended.")
    assert rollout.stop is StopReason.TOOL_DONE
    assert rewards(rollout) == [0.0] * 5 + [1.0]
    ended = {"seed": 0, "steps": 6, "return": 1.0, "terminated": True, "truncated": False}
    assert rollout.infos["environment"] == ended
    assert [(scored.reward, scored.success, scored.turn_scores[-1]) for scored in group.scored] == [(1.0, True, 1.0)]


@pytest.mark.parametrize("name", ACTIONS)
async def test_rewards_of_scripted_episodes_are_those_of_gymnasium_alone(name: str) -> None:
    draw = Random(name)
    scripts = [(seed, [draw.randrange(ACTIONS[name]) for _ in range(12)]) for seed in range(8)]
    command = [str(GYM_PYTHON), str(REFERENCE), name]
    expected = json.loads((await anyio.run_process(command, input=json.dumps(scripts).encode())).stdout)
    async with open_run(f"gymnasium:{name}", n_tasks=8) as runs:
        names = runs.gateway.specs[0].parameters["properties"]["action"]["enum"]
        rollouts = [
            await runs.run(*(act(names[action]) for action in actions), "I stop.", row=seed)
            for seed, actions in scripts
        ]
    assert [rewards(rollout) for rollout in rollouts] == [episode["rewards"] for episode in expected]
    ended = [rollout.infos["environment"] for rollout in rollouts]
    assert [info["terminated"] for info in ended] == [episode["terminated"] for episode in expected]


async def test_more_rollouts_than_sessions_wait_for_each_other() -> None:
    async with open_run("gymnasium:FrozenLake-v1", sessions=1, wait_s=60) as lake:
        rollouts = []

        async def play(index: int) -> None:
            rollouts.append(await lake.run(act("down"), "I stop.", index=index))

        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(play, index)
    assert [rollout.stop for rollout in rollouts] == [StopReason.DONE] * 4


async def test_steps_of_one_turn_are_taken_in_order_and_none_after_the_end() -> None:
    both = render_calls(("step", {"action": "stick"}), ("step", {"action": "hit"}))
    async with open_run("gymnasium:Blackjack-v1") as cards:
        rollout = await cards.run(both)
    assert observations(rollout)[-1] == "The episode is over: it has ended."
    assert rollout.infos["environment"]["steps"] == 1
    assert rollout.stop is StopReason.TOOL_DONE


async def test_longest_episode_is_truncated() -> None:
    async with open_run("gymnasium:FrozenLake-v1", max_steps=2, show_reward=False) as lake:
        rollout = await lake.run(act("left"), act("left"))
    assert observations(rollout)[-1].endswith("The episode is over: it was cut off after 2 steps.")
    info = rollout.infos["environment"]
    assert (info["terminated"], info["truncated"], info["steps"]) == (False, True, 2)


async def test_what_is_no_action_is_the_policys_mistake_and_no_step() -> None:
    async with open_run("gymnasium:FrozenLake-v1", action_names=["W", "S", "E", "N"]) as lake:
        called = await lake.run(act("left"), act("W"), "I stop.")
    assert "is not one of" in observations(called)[1]
    assert called.infos["environment"]["steps"] == 1
    async with open_run("gymnasium:FrozenLake-v1", actions="text") as lake:
        written = await lake.run("I go\ndown", "somewhere", "2", "`up`")
    assert "write one of left, down, right, up, alone in the last line" in observations(written)[2]
    assert written.infos["environment"]["steps"] == 3
    assert [message["role"] for message in written.ledger.messages][:3] == ["user", "assistant", "user"]


async def test_action_that_the_environment_refuses_is_the_policys_mistake() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "refuse"}) as runs:
        rollout = await runs.run(act(2), "I stop.")
    assert observations(rollout)[1] == "This is no action: that square is taken"
    assert (rollout.stop, rollout.infos["environment"]["steps"]) == (StopReason.DONE, 0)


async def test_action_that_is_nested_too_deeply_is_the_policys_mistake() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"space": "box"}, actions="text", max_steps=1) as runs:
        limits = runs.limits.model_copy(update={"turn_tokens": 100_000})
        rollout = await runs.run("[" * 3000 + "]" * 3000, "[0.5, 0.5]", limits=limits)
    assert "write it as JSON, alone in the last line" in observations(rollout)[1]
    assert rollout.infos["environment"]["return"] == 0.5


@pytest.mark.parametrize("space", ["box", "multi_discrete", "dict", "tuple"])
async def test_composed_actions_are_called_with_and_refused_before_the_environment_sees_them(space: str) -> None:
    _, action, wrong, echo = SPACES[space]
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"space": space}) as runs:
        rollout = await runs.run(act(wrong), act(action), "I stop.")
    assert echo in observations(rollout)[2] and rollout.infos["environment"]["steps"] == 1


def test_each_space_of_actions_has_a_schema_and_takes_its_values() -> None:
    code = (
        "import json, sys, sample_gym, gymnasium_adapter as spaces\n"
        "for name, action, wrong in json.loads(sys.argv[1]):\n"
        "    space, row = sample_gym.SPACES[name], {}\n"
        "    row['schema'] = spaces.action_schema(space)\n"
        "    row['action'] = repr(spaces.read_action(space, action))\n"
        "    try: spaces.read_action(space, wrong)\n"
        "    except (ValueError, TypeError, LookupError) as error: row['refused'] = str(error)\n"
        "    print(json.dumps(row))\n"
    )
    cases = json.dumps([(name, action, wrong) for name, (_, action, wrong, _) in SPACES.items()])
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(ADAPTERS)])
    done = subprocess.run(
        [str(GYM_PYTHON), "-c", code, cases], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for (name, (schema, _, _, echo)), row in zip(SPACES.items(), rows, strict=True):
        assert schema.items() <= row["schema"].items(), name
        assert echo in row["action"] and row["refused"], name


SPACES: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "discrete": ({"type": "integer", "minimum": 2, "maximum": 4}, 4, 5, "4"),
    "box": ({"type": "array", "minItems": 2}, [0.5, -1], [0.5, 2], "0.5, -1."),
    "whole_box": ({"type": "array", "maxItems": 2}, [[1, 2], [3, 4]], [[1, 2], [3, 4.5]], "[3, 4]"),
    "multi_discrete": ({"type": "array", "minItems": 2}, [1, 2], [2, 2], "[1, 2]"),
    "multi_binary": ({"items": {"type": "integer", "minimum": 0, "maximum": 1}}, [1, 0, 1], [1, 0], "[1, 0, 1]"),
    "text": ({"type": "string", "pattern": r"^[\-\]\^ab]*$"}, "a-]^b", "c", "'a-]^b'"),
    "dict": ({"required": ["force", "move"]}, {"move": 1, "force": 0.25}, {"move": 1}, "0.25"),
    "tuple": ({"type": "array", "minItems": 2}, [1, "abc"], [1], "'abc'"),
    "sequence": ({"type": "array"}, [3, 0], [4], "3"),
    "one_of": ({}, [1, "abc"], [2, "abc"], "'abc'"),
}
"""Of each space, a part of the schema, an action, what is none, and a part of the action as Python writes it."""


async def test_pictures_in_observations_and_of_what_is_rendered_are_images() -> None:
    async with open_run("gymnasium:sample_gym:Pixels-v0", args={"render_mode": "rgb_array"}) as runs:
        rollout = await runs.run(act(0), "I stop.")
    parts = rollout.ledger.entries[2].parts
    images = [part for part in parts if isinstance(part, Image)]
    assert [image.data[:4] for image in images] == [b"\x89PNG"] * 2
    async with open_run("gymnasium:sample_gym:Grey-v0") as runs:
        grey = await runs.run(act(2), "I stop.")
    assert [image.data[:4] for image in grey.ledger.entries[2].parts if isinstance(image, Image)] == [b"\x89PNG"]
    assert parts[0].text == '{"eye": "(image 1)", "speed": 0.333333}'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "options", "problem", "remedy"),
    [
        ("FrozenLak-v1", {}, "Did you mean: `FrozenLake`", "-m pip install"),
        ("FrozenLake-v1", {"args": {"size": 3}}, "cannot be made", "environment.args"),
        ("sample_gym:Echo-v0", {"args": {"space": "graph"}}, "a Graph space cannot be", "wrap the environment"),
        ("sample_gym:Nope-v0", {}, "cannot be made", "correct the name"),
        ("no_such_package:Echo-v0", {}, "cannot be made", "-m pip install"),
        ("FrozenLake-v1", {"python": "/no/python"}, "'/no/python' cannot be started", "/path/to/venv"),
        ("FrozenLake-v1", {"python": None}, f"{sys.executable} has no gymnasium", "as `environment.python`"),
    ],
)
async def test_what_cannot_be_opened_is_refused_with_a_remedy(
    name: str, options: dict[str, Any], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        async with make_gateway(make_settings(f"gymnasium:{name}", **options)):
            pass
    stop_hosts()
    assert problem in str(raised.value) and remedy in str(raised.value)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("raise", "step: ValueError: the physics exploded"),
        ("die", "ended (exit code 3)"),
        ("nan", "gave the reward nan, which is not a number"),
        ("raise in reset", "open: OSError: no such world"),
        ("far too huge", "an answer of 65 MB is too long"),
    ],
)
async def test_environment_that_breaks_costs_the_rollout_and_is_never_scored(trouble: str, reason: str) -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": trouble}) as runs:
        rollout = await runs.run(act(2), act(2))
        group = await runs.score(rollout)
    assert rollout.stop is StopReason.TOOL_FAILED and reason in rollout.reason
    assert not group.scored and not rollout.rewards


async def test_environment_that_breaks_on_a_written_action_is_never_scored_either() -> None:
    options = {"args": {"trouble": "raise", "space": "box"}, "actions": "text"}
    async with open_run("gymnasium:sample_gym:Echo-v0", **options) as runs:
        rollout = await runs.run("[0.5, 0.5]", "[0.5, 0.5]")
    assert rollout.stop is StopReason.TOOL_FAILED and "the physics exploded" in rollout.reason
    assert not rollout.rewards


async def test_what_an_environment_prints_does_not_reach_the_wire() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "print"}) as runs:
        rollout = await runs.run(act(2), act(3), act(4))
        log = get_host(EnvironmentSettings.of(runs.settings)).start().describe_log()
    assert rollout.infos["environment"]["return"] == 1.5
    assert "noise" in log and "not a line of JSON" in log


async def test_huge_observation_is_cut_and_says_how_much_is_left_out() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "huge"}) as runs:
        limits = runs.limits.model_copy(update={"rollout_tokens": 2**22})
        rollout = await runs.run(act(2), "I stop.", limits=limits)
    assert "x\n(and 7 more characters)\nreward: 0" in observations(rollout)[1]


async def test_reset_that_never_answers_is_given_up() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "hang in reset"}, timeout_s=3) as runs:
        rollout = await runs.run("I stop.")
    assert rollout.stop is StopReason.TOOL_FAILED and "did not answer 'open' within 3 s" in rollout.reason


async def test_step_that_hangs_is_given_up_and_later_rollouts_get_another_process() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "hang"}, timeout_s=3) as runs:
        before = runs.pid
        rollout = await runs.run(act(2))
        assert "did not answer 'step' within 3 s" in rollout.reason and "environment.timeout_s" in rollout.reason
        await wait_until(lambda: not psutil.pid_exists(before))
        resting = await runs.run("I stop.")
        assert resting.stop is StopReason.DONE and runs.pid != before


async def test_process_that_was_stopped_on_purpose_has_not_failed() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0") as runs:
        host = get_host(EnvironmentSettings.of(runs.settings))
        for _ in range(MAX_STARTS + 1):
            await host.stop_async()
            await anyio.to_thread.run_sync(host.start)


RUN = """
model: {model}
environment: {{name: "gymnasium:FrozenLake-v1", python: ./python, n_tasks: 2, max_steps: 3}}
limits: {{turn_tokens: 8, rollout_tokens: 2000}}
"""


def test_tape_is_replayed_with_nothing_installed(model: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    python_here = Path("python")
    python_here.write_text(f'#!/bin/sh\nexec {GYM_PYTHON} "$@"\n')
    python_here.chmod(0o755)
    write("run.yaml", RUN.format(model=model))
    command = ["rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch"]
    recorded = CliRunner().invoke(app, command)
    assert recorded.exit_code == 0, recorded.output
    stop_hosts()
    python_here.unlink()
    monkeypatch.delenv("PYTHONPATH")
    replayed = CliRunner().invoke(app, ["replay", "runs/x"])
    assert replayed.exit_code == 0, replayed.output
    assert "4 rollouts replayed, 0 of them differ" in replayed.output

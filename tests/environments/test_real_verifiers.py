"""What environments of the real `verifiers` answer and give here is what their own runner has for the same turns."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.docs.blocks import ROOT, blocks_of
from tests.trainer.policy_scripts import render_calls
from tests.trainer.verifiers.verifiers_runs import make_settings, open_environment, texts_of
from tests.verifiers.conftest import python_of
from trainer.environments.host_process import stop_hosts
from trainer.environments.reward import environment_reward
from trainer.reward.attempt import Attempt
from trainer.setup import load_data

REFERENCE = Path(__file__).with_name("reference.py")
Turn = str | tuple[str, dict[str, Any]]
"""What the policy writes: text, or a call of a tool with its arguments."""
GROUPS: dict[str, tuple[str, str, list[list[Turn]]]] = {
    "tool_env": ("v0", "shop_env", [
        [("price", {"item": "apple"}), "It is 6."],
        [("price", {"item": "fig"}), ("price", {"item": "apple"}), "It is 5."],
        ["It is 6."],
        [("price", {"item": "apple"})] * 4,
    ]),
    "stateful_tool_env": ("v0", "basket_env", [
        [("put", {"item": "pear"}), ("put", {"item": "fig"}), "Done."],
        [("put", {"item": "fig"}), "Done."],
    ]),
    "multi_turn_env": ("v0", "guess_env", [["2", "7", "5"], ["5"], ["1", "2", "3", "4", "6", "7"]]),
    "taskset": ("v1", "fruit_taskset", [
        [("shop_price", {"item": "apple"}), "It is 2."],
        [("shop_price", {"item": "fig"}), "It is 3."],
        [("shop_price", {"item": "apple"})] * 3,
        ["It is 2."],
    ]),
}  # fmt: skip


def to_text(turn: Turn) -> str:
    return turn if isinstance(turn, str) else render_calls(turn)


def to_message(turn: Turn, number: int) -> dict[str, Any]:
    if isinstance(turn, str):
        return {"content": turn}
    function = {"name": turn[0], "arguments": json.dumps(turn[1])}
    return {"content": "", "tool_calls": [{"id": f"call_{number}_0", "type": "function", "function": function}]}


def run_reference(interface: str, environment: str, group: list[list[Turn]]) -> list[dict[str, Any]]:
    scripts = {
        f"rollout-{index}": [to_message(turn, number) for number, turn in enumerate(turns, 1)]
        for index, turns in enumerate(group)
    }
    command = [python_of(interface), str(REFERENCE), interface, environment, json.dumps(scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def chat_texts(chat: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], str(message.get("content") or "")) for message in chat]


@pytest.mark.parametrize("kind", GROUPS)
async def test_answers_and_scores_are_those_of_the_environments_own_runner(kind: str) -> None:
    interface, environment, group = GROUPS[kind]
    expected = run_reference(interface, environment, group)
    async with open_environment(environment, python=python_of(interface), timeout_s=120) as opened:
        rollouts = [await opened.run(*map(to_text, turns), index=index) for index, turns in enumerate(group)]
        scored = await opened.score(*rollouts)
        attempts = [Attempt(opened.tasks[0], rollout) for rollout in rollouts]
        metrics = {name: environment_reward(attempts, name) for name in expected[0]["metrics"]}
    assert not scored.failed
    assert [texts_of(rollout) for rollout in rollouts] == [chat_texts(result["chat"]) for result in expected]
    assert [one.reward for one in scored.scored] == pytest.approx([result["reward"] for result in expected])
    assert metrics == {name: [result["metrics"][name] for result in expected] for name in metrics}
    stops = [rollout.infos["environment"]["stop"] for rollout in rollouts]
    assert stops == [result["stop"] for result in expected]


def test_environment_of_the_other_interface_is_refused_with_the_release_that_has_it(write: Write) -> None:
    write("old_env.py", "def load_environment():\n    pass\n")
    with pytest.raises(ConfigError, match=r"verifiers 0\.4\.\d no longer knows(.|\n)*verifiers==0\.3\.1"):
        load_data(make_settings("old_env", python=python_of("v1")), "verifiers")
    with pytest.raises(ConfigError, match=r"'guess_env' needs datasets, which .* lacks"):
        load_data(make_settings("guess_env", python=python_of("v1")), "verifiers")
    with pytest.raises(ConfigError, match=r"does not know \(0\.3\.1\)(.|\n)*verifiers>=0\.4\.0"):
        load_data(make_settings("fruit_taskset", python=python_of("v0")), "verifiers")
    stop_hosts()


@pytest.mark.parametrize(
    ("interface", "file", "turns", "reward"),
    [
        ("v0", "my_shop.py", [("price", {"item": "melon"}), "It is 7."], 1.0),
        ("v1", "fruit_taskset.py", [("shop_price", {"item": "apple"}), "It is 2."], 1.0),
    ],
)
async def test_environments_that_the_guide_shows_run_with_the_release_that_it_names(
    interface: str, file: str, turns: list[Turn], reward: float, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    (block,) = (block for block in blocks_of(ROOT / "docs/migration-verifiers.md") if block.file == file)
    write(file, block.text)
    async with open_environment(Path(file).stem, python=python_of(interface), timeout_s=120) as opened:
        group = await opened.score(await opened.run(*map(to_text, turns)))
    assert [scored.reward for scored in group.scored] == [reward]


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("needing", "pass  # task", "NEEDS_CONTAINER = True", "needs a container"),
        ("crowded", "'OneTaskset'", "'OneTaskset', 'Crowd'", "brings an environment with several agents"),
        ("armed", "'OneTaskset'", "'OneTaskset', 'Program'", "brings a harness of its own"),
        ("unfit", "", "", "refuses its arguments"),
    ],
)
def test_taskset_that_is_more_than_one_chat_is_refused(
    name: str, old: str, new: str, problem: str, write: Write
) -> None:
    write(f"{name}.py", TASKSET.replace(old, new) if old else TASKSET)
    args = {"args": {"no_field": 1}} if name == "unfit" else {}
    with pytest.raises(ConfigError, match=problem):
        load_data(make_settings(name, python=python_of("v1"), **args), "verifiers")
    stop_hosts()


TASKSET = """
    import verifiers.v1 as vf

    class OneTask(vf.Task[vf.TaskData]):
        pass  # task

    class OneTaskset(vf.Taskset[OneTask, vf.TasksetConfig]):
        def load(self):
            yield OneTask(vf.TaskData(prompt='Say one.'))

    class CrowdConfig(vf.EnvConfig):
        first: vf.AgentConfig = vf.AgentConfig()
        second: vf.AgentConfig = vf.AgentConfig()

    class Crowd(vf.Env[CrowdConfig]):
        async def run(self, task, agents):
            await agents.first.run(task)

    class Program(vf.Harness[vf.HarnessConfig]):
        async def launch(self, *given, **options):
            raise NotImplementedError

    __all__ = ['OneTaskset']
"""

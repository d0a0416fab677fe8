"""verifiers: 200 scripted episodes of each of its interfaces, 64 at once, are those of its own runner."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.environments.host_process import stop_hosts
from mtrl_plugins.environments.reward import environment_reward
from tests.conftest import Write
from tests.docs.blocks import ROOT, blocks_of
from tests.environments.real_environments import EPISODES, FOLDERS, REFERENCE_S, play_all, python_of, run_reference
from tests.plugins.verifiers.verifiers_runs import make_settings, open_environment, texts_of
from tests.trainer.policy_scripts import render_calls
from trainer.reward.attempt import Attempt
from trainer.setup import load_data

REFERENCE = Path(__file__).with_name("verifiers_reference.py")
GROUP = 4
"""Rollouts of a row that are scored together."""
Turn = str | tuple[str, dict[str, Any]]
"""What the policy writes: text, or a call of a tool with its arguments."""


def ask(tool: str, item: str, **more: Any) -> Turn:
    return tool, {"item": item, **more}


POOLS: dict[str, tuple[str, int, int, int, list[Turn], list[Turn]]] = {
    "shop_env": ("v0", EPISODES // 2, 2, 4, [ask("price", "apple"), ask("price", "fig"), ask("price", "pear")],
                 ["It is 6.", "It is 8.", "No idea."]),
    "basket_env": ("v0", EPISODES // 5, 1, 5, [ask("put", "pear"), ask("put", "fig"), ask("put", "plum")], ["Done."]),
    "guess_env": ("v0", EPISODES * 3 // 10, 1, 6, [str(number) for number in range(1, 10)], ["5"]),
    "market_taskset": ("v1", EPISODES * 9 // 10, 8, 4,
                       [ask("price", "apple"), ask("price", "pear", count=2), ask("price", "gold")],
                       ["It is 2.", "It is 6.", "It is 15.", "No idea."]),
    "fruit_taskset": ("v1", EPISODES // 10, 2, 3, [ask("shop_price", "apple"), ask("shop_price", "fig")],
                      ["It is 2.", "It is 4."]),
    "talk_taskset": ("v1", EPISODES // 50, 2, 3, ["5", "6"], ["5"]),
}  # fmt: skip
"""Environments: interface, episodes, rows, the longest episode, and turns to draw from, before the last and as it."""


def to_text(turn: Turn) -> str:
    return turn if isinstance(turn, str) else render_calls(turn)


def to_message(turn: Turn, number: int) -> dict[str, Any]:
    if isinstance(turn, str):
        return {"content": turn}
    function = {"name": turn[0], "arguments": json.dumps(turn[1])}
    return {"content": "", "tool_calls": [{"id": f"call_{number}_0", "type": "function", "function": function}]}


def to_script(turns: list[Turn]) -> list[dict[str, Any]]:
    """The turns as the messages that a model server sends."""
    return [to_message(turn, number) for number, turn in enumerate(turns, 1)]


def chat_texts(chat: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], str(message.get("content") or "")) for message in chat]


def draw_scripts(name: str) -> list[tuple[int, list[Turn]]]:
    """A row and the policy's turns for each episode; the last turn ends it if none did before."""
    _, count, rows, longest, turns, last = POOLS[name]
    draw = Random(name)
    return [
        (index // GROUP % rows, [*draw.choices(turns, k=draw.randrange(longest)), draw.choice(last)])
        for index in range(count)
    ]


@pytest.mark.parametrize("name", POOLS)
async def test_episodes_are_those_of_verifiers_own_runner(name: str) -> None:
    interface, (scripts, longest) = POOLS[name][0], (draw_scripts(name), POOLS[name][3])
    if name in ("guess_env", "talk_taskset"):  # They decide when it is over.
        scripts = [(row, [*turns[:-1], *["5"] * longest]) for row, turns in scripts]
    grouped = [scripts[start : start + GROUP] for start in range(0, len(scripts), GROUP)]
    job = [
        (group[0][0], {f"rollout-{number}-{index}": to_script(turns) for index, (_, turns) in enumerate(group)})
        for number, group in enumerate(grouped)
    ]
    python = python_of(FOLDERS[interface])
    expected = await run_reference(FOLDERS[interface], REFERENCE, interface, name, job=job)
    async with open_environment(name, REFERENCE_S, python=python, timeout_s=300) as runs:
        rollouts = await play_all(runs, [(row, [*map(to_text, turns)]) for row, turns in scripts])
        scored, metrics = [], dict[str, list[Any]]()
        for start, group in zip(range(0, len(rollouts), GROUP), grouped, strict=True):
            members, row = rollouts[start : start + GROUP], group[0][0]
            scored += (await runs.score(*members, row=row)).scored
            attempts = [Attempt(runs.tasks[row], rollout) for rollout in members]
            for metric in expected[0]["metrics"]:
                metrics.setdefault(metric, []).extend(environment_reward(attempts, metric))
    assert [texts_of(rollout) for rollout in rollouts] == [chat_texts(result["chat"]) for result in expected]
    assert [one.reward for one in scored] == [result["reward"] for result in expected]
    assert metrics == {metric: [result["metrics"][metric] for result in expected] for metric in metrics}
    stops = [rollout.infos["environment"]["stop"] for rollout in rollouts]
    assert stops == [result["stop"] for result in expected]
    assert len({result["reward"] for result in expected}) > 1


def test_environment_of_the_other_interface_is_refused_with_the_release_that_has_it(write: Write) -> None:
    write("old_env.py", "def load_environment():\n    pass\n")
    with pytest.raises(ConfigError, match=r"verifiers 0\.4\.\d no longer knows(.|\n)*verifiers==0\.3\.1"):
        load_data(make_settings("old_env", python=python_of(FOLDERS["v1"])), "environment")
    with pytest.raises(ConfigError, match=r"'guess_env' needs datasets, which .* lacks"):
        load_data(make_settings("guess_env", python=python_of(FOLDERS["v1"])), "environment")
    with pytest.raises(ConfigError, match=r"does not know \(0\.3\.1\)(.|\n)*verifiers>=0\.4\.0"):
        load_data(make_settings("fruit_taskset", python=python_of(FOLDERS["v0"])), "environment")
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
    async with open_environment(Path(file).stem, python=python_of(FOLDERS[interface]), timeout_s=120) as opened:
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
        load_data(make_settings(name, python=python_of(FOLDERS["v1"]), **args), "environment")
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

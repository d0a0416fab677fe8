"""The real `verifiers`: which release has which environments, what the guide shows, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.environments.host_process import stop_hosts
from tests.conftest import Write
from tests.docs.blocks import ROOT, blocks_of
from tests.environments.real_environments import FOLDERS, python_of
from tests.environments.test_verifiers_episodes import Turn, to_text
from tests.plugins.verifiers.verifiers_runs import make_settings, open_environment
from trainer.setup import load_data


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

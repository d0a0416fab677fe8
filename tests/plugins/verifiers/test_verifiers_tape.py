"""Runs on environments of `verifiers` are recorded, and replayed where nothing is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtrl_plugins.environments.host_process import (
    HOST_TAPE,
    EnvironmentFailed,
    HostTape,
    RecordedHost,
    host_key,
    hosts,
    stop_hosts,
)
from mtrl_plugins.environments.settings import EnvironmentSettings
from tests.conftest import Write
from tests.plugins.verifiers.verifiers_runs import make_settings, open_environment
from trainer.cli import app
from trainer.reward.attempt import Attempt
from trainer.storage.rollout_file import Rollouts

RUN = """
model: {model}
environment: {{name: "verifiers:length_env", python: ./python}}
record: true
n: 2
limits: {{turn_tokens: 8, rollout_tokens: 400}}
"""
LENGTH = """
    import verifiers as vf

    def length(completion, **more):
        return float(len(completion[-1]["content"] or "") % 4)

    def load_environment():
        rows = [{"question": "Write."}, {"question": "Write more."}]
        return vf.ToolEnv(dataset=rows, tools=[], rubric=vf.Rubric(funcs=[length]), max_turns=4)
"""
TRAINING = "prompts: 2\nsteps: 2\nengine: torch\n"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture
def run_file(write: Write, model: Path, one_thread: None) -> Callable[..., None]:
    """Writes a run file, whose Python can be deleted."""
    python = Path("python")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    write("length_env.py", LENGTH)
    return lambda more="": write("run.yaml", RUN.format(model=model) + more)


def uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_hosts()
    Path("python").unlink()
    monkeypatch.delenv("PYTHONPATH")


def test_step_is_replayed_with_the_scores_that_the_environment_gave(
    run_file: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file(TRAINING)
    trained = invoke("--config", "run.yaml", "--out", "runs/y")
    assert trained.exit_code == 0, trained.output
    rewards = [rollout.rewards["environment"] for rollout in Rollouts(Path("runs/y")) if rollout.rewards]
    assert len(set(rewards)) > 1
    uninstall(monkeypatch)
    replayed = invoke("replay", "runs/y", "2")
    assert replayed.exit_code == 0, replayed.output
    assert "replayed 4 rollouts of step 2; 0 differ" in replayed.output
    assert "as recorded" in replayed.output


async def test_recorded_scores_belong_to_the_start_of_the_process_that_gave_them(tmp_path: Path) -> None:
    settings = EnvironmentSettings.of(make_settings("shop_env"))
    assert settings is not None
    async with open_environment("shop_env") as shop:
        start_tape = settings.record(is_on=True)
        assert start_tape is not None
        rollouts = [await shop.run(answer, index=index) for index, answer in enumerate(("It is 6.", "It is 5."))]
        before = [one.reward for one in (await shop.score(*rollouts)).scored]
        start_tape(tmp_path)
        attempts = [Attempt(shop.tasks[0], rollout) for rollout in rollouts]
    names = [attempt.infos["environment"]["rollout"] for attempt in attempts]
    host = RecordedHost(settings, tmp_path)
    assert [score["reward"] for score in host.score(1, names)] == before == [1.25, 0.25]
    assert host.score(2, names) == [None, None]
    with pytest.raises(EnvironmentFailed, match="record the run again"):
        await host.request_async("open", split="train", row=0)
    with pytest.raises(EnvironmentFailed, match="has no rows of 'train' from 0 on"):
        host.rows("train", 0, 5)


def test_recorded_host_answers_only_as_long_as_the_replay_lasts(tmp_path: Path) -> None:
    settings = EnvironmentSettings.of(make_settings("shop_env"))
    assert settings is not None
    HostTape().start(tmp_path)
    with settings.replay(tmp_path):
        assert isinstance(hosts.get(host_key(settings)), RecordedHost)
    assert hosts.get(host_key(settings)) is None


async def test_later_run_that_is_not_recorded_writes_to_no_tape(tmp_path: Path) -> None:
    settings = EnvironmentSettings.of(make_settings("shop_env"))
    assert settings is not None
    start_tape = settings.record(is_on=True)
    assert start_tape is not None
    start_tape(tmp_path)
    assert settings.record(is_on=False) is None
    async with open_environment("shop_env"):
        assert (tmp_path / HOST_TAPE).read_bytes() == b""

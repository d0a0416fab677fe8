"""The demo of shell tasks: its tasks, its demonstrations, and rollouts in boxes that are graded by what they leave."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from gateway.errors import ConfigError
from gateway.types import Task, ToolCall
from mtrl_plugins.demo.demos import HELD_OUT_SEED
from mtrl_plugins.demo.shell.machine_root import make_machine_root
from mtrl_plugins.demo.shell.shell_tasks import KINDS, draw_draft, draw_problems
from mtrl_plugins.harbor.harbor_rollout import call_task
from mtrl_plugins.harbor.harbor_toolset import BEGIN, END_STEP
from tests.trainer.train.jobs import demo_model
from tests.waiting import PATIENCE_S
from trainer.cli.run_file import find_run_file, load_settings
from trainer.setup import make_gateway
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import METRICS_FILE
from trainer.train.settings import TrainSettings
from trainer.train.start import train


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of data with no root in it."""
    folder = tmp_path_factory.getbasetemp() / "shell-data"
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    return folder


def test_twenty_kinds_of_tasks_share_no_request_between_the_splits() -> None:
    assert len(KINDS) == 20
    requests = {
        split: {draw_draft(seed, number, kind, split).request for kind in KINDS for number in range(10)}
        for split, seed in (("train", 0), ("held_out", HELD_OUT_SEED))
    }
    assert not requests["train"] & requests["held_out"]
    shown = {str(problem.task.messages[0]["content"]) for problem in islice(draw_problems("test"), 200)}
    assert not shown & requests["held_out"]


async def test_demonstrated_commands_do_each_task_and_doing_nothing_does_none() -> None:
    settings = load_settings(TrainSettings, find_run_file("shell"), {})
    worth = {}

    async def play(kind: str, *, works: bool) -> None:
        draft = draw_draft(0, 1, kind, "train")
        async with gateway.open(Task(f"01-{kind}")) as session:
            assert (await call_task(session, BEGIN))["instruction"] == draft.request
            for command, printed in draft.commands if works else ():
                result = await session.call(ToolCall("1", "shell", json.dumps({"command": command})))
                assert result.text == printed
            worth[kind, works] = (await call_task(session, END_STEP))["rewards"]["reward"]

    with anyio.fail_after(PATIENCE_S):
        async with make_gateway(settings) as gateway, anyio.create_task_group() as tasks:
            for kind in KINDS:
                tasks.start_soon(lambda kind: play(kind, works=True), kind)
            tasks.start_soon(lambda: play("rename", works=False))
    assert worth == {**{(kind, True): 1.0 for kind in KINDS}, ("rename", False): 0.0}


def test_root_has_nothing_of_the_machine_but_named_programs_and_their_libraries(folders: Path) -> None:
    files = folders / "mtrl" / "roots" / make_machine_root() / "files"
    assert (files / "bin" / "grep").is_file() and not {"etc", "home", "root", "usr"} & {*os.listdir(files)}


def test_missing_bubblewrap_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.sandbox.choose_provider.find_problem", lambda: "bwrap is not installed")
    settings = load_settings(TrainSettings, find_run_file("shell"), {})
    with pytest.raises(ConfigError, match="tasks cannot be played here: bwrap is not installed"):
        settings.environment.require_ready()


async def test_job_trains_on_rollouts_in_boxes(tmp_path: Path, one_thread: None) -> None:
    changes = {"model": str(demo_model()), "prompts": 2, "n": 2, "steps": 2, "evaluation": {"every": 0}}
    settings = load_settings(TrainSettings, find_run_file("shell"), changes)
    with anyio.fail_after(PATIENCE_S):
        await train(settings, tmp_path / "run", Console(file=io.StringIO()))
    rollouts = list(Rollouts(tmp_path / "run"))
    assert len(rollouts) == 8 and all(rollout.rewards["environment"] in (0.0, 1.0) for rollout in rollouts)
    line = json.loads((tmp_path / "run" / METRICS_FILE).read_text().splitlines()[-1])
    assert line["step"] == 2 and line["rollout/lost"] == 0

"""The command `make-tasks`: what it prints and writes, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from mtrl_plugins.task_maker import explore
from mtrl_plugins.task_maker.make_tasks import TaskMaker
from trainer.cli import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "SURVEY_SESSIONS", 2)
    monkeypatch.setattr(explore, "RANDOM_CALLS", 2)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["make-tasks", "--mcp", str(FOLDER / "servers.json"), *words])
    return done.exit_code, done.output


def test_command_writes_tasks_and_prints_a_report(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    code, text = run("--server", "shelves", "--n", "3", "--levels", "1", "--out", str(out))
    assert code == 0, text
    assert "3 tasks of the server `shelves`" in text and "| level (calls) | training | held out |" in text
    assert "mtrl-train --config" in text.replace("\n", " ") and len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--server", "shelves", "--levels", "one"), "--levels"),
        (("--server", "shelves", "--state", "other"), "no state 'other' remedy: give the server a folder of them"),
        (("--server", "shelves", "--n", "0"), "--n"),
    ],
)
def test_mistakes_are_told_with_their_option(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    code, text = run(*words, "--out", str(tmp_path / "tasks.jsonl"))
    assert code != 0 and problem in " ".join(text.split()) and "Traceback" not in text


def test_files_that_exist_are_refused_before_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "tasks.held_out.jsonl").write_text("mine")
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.jsonl"))
    assert code == 2 and "tasks.held_out.jsonl" in text.replace("\n", "") and "already exists" in text
    assert (tmp_path / "tasks.held_out.jsonl").read_text() == "mine" and "server shelves" not in text
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.yaml"))
    assert code == 2 and "name it tasks.jsonl" in text


def stop_after_first_task(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """What a user's Ctrl-C raises, or a server that is gone, in the middle of the work."""
    settle = TaskMaker._settle

    def settle_and_stop(self: TaskMaker, found: Any) -> None:
        settle(self, found)
        if self.made:
            raise error

    monkeypatch.setattr(TaskMaker, "_settle", settle_and_stop)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped; the tasks so far are in"),
        (ConfigError("the server cannot be used: gone", remedy="correct its entry"), 2, "the server cannot be used"),
    ],
)
def test_tasks_made_so_far_are_written_when_the_command_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    stop_after_first_task(monkeypatch, error)
    out = tmp_path / "tasks.jsonl"
    ended, text = run("--server", "shelves", "--n", "40", "--levels", "1", "--held-out", "0", "--out", str(out))
    assert ended == code and words in " ".join(text.split())
    assert len(out.read_text().splitlines()) == 1 and "evaluation" not in out.with_suffix(".yaml").read_text()
    assert not out.with_name("tasks.held_out.jsonl").exists()
    assert "1 of 40 tasks: it was stopped." in " ".join(text.split())


def test_command_stopped_before_the_first_task_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explore.Explorer, "survey", stop)
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.jsonl"))
    assert code == 130 and "there are no tasks yet" in text and not list(tmp_path.iterdir())

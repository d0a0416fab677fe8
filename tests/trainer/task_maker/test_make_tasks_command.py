"""The command `make-tasks`: what it prints and writes, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainer.cli import app
from trainer.demo.shelves.shelves_demo import FOLDER
from trainer.task_maker import explore, random_policy


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "SURVEY_SESSIONS", 2)
    monkeypatch.setattr(random_policy, "RANDOM_CALLS", 2)


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
        (("--server", "shelvs"), "there is no server 'shelvs'"),
        (("--server", "shelves", "--levels", "one"), "--levels"),
        (("--server", "shelves", "--state", "other", "--tool", "find"), "no tool 'find'"),
    ],
)
def test_mistakes_are_told_with_their_option(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    code, text = run(*words, "--out", str(tmp_path / "tasks.jsonl"))
    assert code != 0 and problem in " ".join(text.split()) and "Traceback" not in text

"""Fixtures of the training tests: the command line, in a folder of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.trainer.train.trainings import Run
from trainer.cli import app


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path) -> Run:
    """`mtrl-train` with these words; what it said."""

    def run(*words: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
        return done.output

    return run

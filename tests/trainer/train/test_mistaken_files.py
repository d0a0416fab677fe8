"""Files and folders that are not what a command takes: each is told once, with what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trainer.train.trainings import Run, write_config


@pytest.mark.parametrize("name", ["rollouts.jsonl", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_files_that_a_run_would_write_over_is_refused(run: Run, name: str) -> None:
    file = Path("own", name)
    file.parent.mkdir()
    file.mkdir() if name == "checkpoints" else file.write_text("mine")
    for words in (("--dry-run",), ()):
        output = run("--config", write_config(), "--out", "own", *words, code=2)
        assert f"own: out: has no run, but {name}, which a run would write over" in output
    assert file.is_dir() or file.read_text() == "mine"
    assert os.listdir("own") == [name]


def test_a_folder_with_logs_of_a_launcher_or_a_start_that_was_killed_is_no_foreign_one(run: Run) -> None:
    Path("r/logs").mkdir(parents=True)
    Path("r/logs/rank-0.log").write_text("starting\n")
    Path("r/job.sh").write_text("mtrl-train\n")
    run("--config", write_config(steps=1), "--out", "r", "--auto-resume")
    Path("r/run.json").unlink()
    Path("r/.lock").unlink()
    assert "which a run would write over" in run("--config", "run.yaml", "--out", "r", code=2)
    Path("r/.lock").touch()  # As of a process that was killed before it wrote run.json.
    run("--config", "run.yaml", "--out", "r", "--auto-resume")

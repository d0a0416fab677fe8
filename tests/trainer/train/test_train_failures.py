"""Failures during a training, and folders of others: they cost at most a step, and the message says how to go on."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import trainer.train.preflight
from tests.trainer.train.jobs import SMALL
from tests.trainer.train.trainings import Run, read_run_metrics, run_in, write_config
from trainer.storage.run_files import read_run_info

WHOLE: dict[str, Any] = {"steps": 3, "prompts": 4, "n": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what made it."""
    return run_in(tmp_path_factory.mktemp("whole"), **WHOLE).parent


@pytest.fixture
def begun(whole: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(whole, place, dirs_exist_ok=True)
    return Path("r")


def test_micro_batches_are_as_large_as_memory_allows_and_stay_so_in_a_resumed_run_unless_it_says_otherwise(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(name: str = "r") -> Any:
        return read_run_info(Path(name))["settings"]["update"]["micro_batch_tokens"]

    run("--config", write_config(steps=1), "--out", "r")
    assert chosen() == 8192
    with monkeypatch.context() as patch:
        patch.setattr(trainer.train.preflight, "total_memory", lambda: 110_000_000)
        run("--config", write_config(steps=1), "--out", "smaller")
        assert chosen("smaller") in (1024, 2048)
        run("--resume", "--out", "r", "--steps", "2")
    assert chosen() == 8192, "sums are made in the order in which they were made"
    lower = write_config(update={**SMALL["update"], "micro_batch_tokens": 512})
    run("--resume", "--out", "r", "--steps", "3", "--config", lower)
    assert chosen() == 512, "what a message says to lower may be lower when the run goes on"


def test_resuming_with_other_settings_is_refused_and_more_steps_are_accepted(run: Run, begun: Path) -> None:
    output = run("--resume", "--out", "r", "--seed", 7, code=2)
    assert "r: the run has other settings: seed was 0, and is now 7\n  remedy: undo these changes" in output
    assert "the folder already has a run\n  remedy: continue it with --resume" in run(
        "--config", "run.yaml", "--out", "r", code=2
    )
    assert "--steps: expected greater than 0, found 0" in run("--resume", "--out", "r", "--steps", 0, code=2)
    run("--resume", "--out", "r", "--steps", 4)
    assert [line["step"] for line in read_run_metrics(begun)] == [1, 2, 3, 4]


def test_folder_of_another_training_process_is_refused(run: Run, begun: Path) -> None:
    with (begun / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        output = run("--resume", "--out", "r", "--steps", 4, code=2)
    assert "r: another process is training in this folder" in output and len(read_run_metrics(begun)) == 3


# Where to go from here.


def test_end_of_a_run_names_its_model_and_next_commands(run: Run, begun: Path) -> None:
    output = run("--resume", "--out", "r", "--steps", 4)
    assert "4 steps are finished; the model is in r/checkpoints/000004" in output
    for words in ("eval r", "show r"):
        assert f"mtrl-train {words} " in output
    assert "r: is a training run\n  remedy: name the step" in run("replay", "r", code=2)
    shown = run("show", "r", 0)
    assert "turn 0: policy" in shown and "look_up" in shown and "without text" not in shown
    assert "trained" in run("why", "r", 0, 30)
    kept = Path("r/checkpoints/000004")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in kept.iterdir()
    }
    assert "step 1 of 1" in run("--config", write_config(model=str(kept), steps=1), "--out", "again")


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

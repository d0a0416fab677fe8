"""Trainings that are killed at any moment, or whose disk fails: resumed with the metrics of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.tape.record import TapeWriter
from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import (
    Run,
    count_lines,
    read_metrics_without_times,
    read_run_metrics,
    run_in,
    write_config,
)
from tests.waiting import PATIENCE_S
from trainer.policy.policy import Policy
from trainer.storage.rollout_file import Rollouts, RolloutWriter

STEPS = 4
UPDATE = {"lr": 1e-3, "warmup_steps": 1, "lr_scheduler": "linear", "decay_steps": STEPS}


def test_run_killed_at_random_moments_has_the_metrics_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = small_job(steps=STEPS, demo={"kinds": ("fact",)}, update=UPDATE)
    (tmp_path / "run.yaml").write_text(settings.model_dump_json())

    def start(out: str) -> AbstractContextManager[subprocess.Popen[str]]:
        return run_process(tmp_path, "-m", "trainer.cli", "--config", "run.yaml", "--out", out, "--auto-resume")

    def finish(out: str) -> list[dict[str, Any]]:
        with start(out) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, output
        return read_metrics_without_times(tmp_path / out)

    draw = random.Random(1)
    for after in sorted(draw.sample(range(STEPS), 2)):
        with start("killed") as process:
            wait_until(lambda: count_lines(tmp_path / "killed") > after, process)  # noqa: B023 - called at once
            time.sleep(draw.random() * 0.3)  # anywhere within a step: this moment is what is tested
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    assert finish("killed") == finish("whole")


JOB: dict[str, Any] = {"steps": 2, "record": True}
RESUME = "continue with `mtrl-train --resume --out r`"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return run_in(tmp_path_factory.mktemp("whole"), **JOB)


def fill_disk(file: FileIO) -> None:
    """What is written to the open file from now on meets a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)


def spoil_before(patch: pytest.MonkeyPatch, owner: type, name: str, call: int, spoil: Callable[[Any], None]) -> None:
    """Spoils something before a method's so-manieth call, counted from 1."""
    calls, real = 0, getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            spoil(self)
        return real(self, *args)

    patch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("owner", "name", "call", "file"),
    [(TapeWriter, "write", 9, "r/tapes"), (RolloutWriter, "_add", 6, "r/rollouts.jsonl")],
)
def test_full_disk_in_any_file_ends_the_run_with_one_error_and_it_can_be_resumed(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, file: str
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda writer: fill_disk(writer._file))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert f"{file}: cannot be written (No space left on device)\n  remedy: make room on " in output
    assert output.count("cannot be written") == 1 and RESUME in " ".join(output.split()) and "Traceback" not in output
    run("--resume", "--out", "r")
    assert read_run_metrics("r") == read_run_metrics(whole)
    assert [rollout.name for rollout in Rollouts(Path("r"))] == [rollout.name for rollout in Rollouts(whole)]


def remove_at_once(folder: Path) -> None:
    """Removes a folder, whatever is written into it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


@pytest.mark.parametrize(("owner", "name", "call"), [(RolloutWriter, "_add", 6), (Policy, "save", 1)])
def test_removed_run_folder_ends_the_run_with_one_error_and_is_not_made_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int
) -> None:
    with monkeypatch.context() as patch:
        spoil_before(patch, owner, name, call, lambda _: remove_at_once(Path("r")))
        output = run("--config", write_config(**JOB), "--out", "r", code=2)
    assert "was removed while it was in use: restore it from a copy" in " ".join(output.split()), output
    assert "Traceback" not in output and not Path("r").exists()

"""Trainings that are killed at any moment, and resumed with the same metrics."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import count_lines, read_metrics_without_times
from tests.waiting import PATIENCE_S

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("killed")
    settings = small_job(
        steps=STEPS,
        demo={"kinds": ("fact",)},
        update={"lr": 1e-3, "warmup_steps": 1, "lr_scheduler": "linear", "decay_steps": STEPS},
    )
    (place / "run.yaml").write_text(settings.model_dump_json())
    return place


def start_training(
    place: Path, out: str, *words: str, config: str = "run.yaml"
) -> AbstractContextManager[subprocess.Popen[str]]:
    chosen = () if "--resume" in words else ("--config", config)
    return run_process(place, "-m", "trainer.cli", *chosen, "--out", out, *words)


def finish_training(place: Path, out: str, *words: str) -> str:
    with start_training(place, out, *words) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict[str, Any]]:
    finish_training(place, "whole")
    return read_metrics_without_times(place / "whole")


def test_run_killed_at_random_moments_has_the_metrics_of_an_uninterrupted_one(
    place: Path, whole: list[dict[str, Any]]
) -> None:
    draw = random.Random(1)
    for after in sorted(draw.sample(range(STEPS), 2)):
        with start_training(place, "killed", "--auto-resume") as process:
            children = psutil.Process(process.pid)
            wait_until(lambda: count_lines(place / "killed") > after, process)  # noqa: B023 - called at once
            time.sleep(draw.random() * 0.3)  # anywhere within a step: this moment is what is tested
            kept = children.children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            wait_until_gone(kept)
    finish_training(place, "killed", "--auto-resume")
    assert read_metrics_without_times(place / "killed") == whole


def wait_until_gone(children: list[psutil.Process]) -> None:
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []

"""A training that is killed at any moment, and resumed with the same metrics."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import count_lines, read_metrics_without_times
from tests.waiting import PATIENCE_S

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

"""Rank 0 under torchrun is stopped: it says nothing, so the other ranks end the job and name it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import write_config

SILENT_S = 6.0


def test_stopped_rank_0_under_torchrun_is_named_by_another_rank_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"engine": "torch", "prompts": 2, "n": 3, "record": False, "steps": 10_000}
    write_config(**settings, distributed={"timeout_s": SILENT_S})
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer.cli")
    metrics = tmp_path / "runs/a/metrics.jsonl"
    with run_process(tmp_path, *launcher, "--config", "run.yaml", "--out", "runs/a") as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
        ranks = psutil.Process(process.pid).children()
        (stopped,) = (rank for rank in ranks if rank.environ().get("RANK") == "0")
        os.kill(stopped.pid, signal.SIGSTOP)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    told = [line for line in output.splitlines() if line.startswith("mtrl-train: ")]
    assert len(told) == 1, output
    assert told[0].startswith("mtrl-train: rank 0 (") and f"process {stopped.pid})" in told[0]
    assert f"has shown no sign of life for {SILENT_S:.0f} s" in told[0] and "continue with --resume" in output
    assert not stopped.is_running(), "the launcher kills it"

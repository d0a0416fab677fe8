"""Every failure of a rank is told by name, once: before it is connected, of rank 0 itself, and under torchrun."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import write_config
from trainer.distributed import connect_ranks as connecting
from trainer.distributed.follow import follow
from trainer.distributed.rank_environment import RankEnvironment
from trainer.distributed.settings import DistributedSettings

SILENT_S = 6.0


def test_rank_that_cannot_reach_rank_0_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connecting, "JOIN_S", 1.0)
    before = signal.getsignal(signal.SIGINT)
    try:
        code = follow(RankEnvironment(1, 2, 1, "127.0.0.1", 9, "torchrun"), DistributedSettings(timeout_s=1))
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert code == 1 and told.count("mtrl-train: rank 1 (") == 1
    assert "2 ranks could not connect at 127.0.0.1:9" in told and "remedy: start all of them" in told


def signal_rank_under_torchrun(
    folder: Path, rank: int, number: signal.Signals, **settings: Any
) -> tuple[psutil.Process, str, str]:
    """Signals a rank of a job of two; returns it, the one line that says why the job ended, and the whole output."""
    write_config(engine="torch", prompts=2, n=3, record=False, steps=10_000, **settings)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer.cli")
    metrics = folder / "runs/a/metrics.jsonl"
    with run_process(folder, *launcher, "--config", "run.yaml", "--out", "runs/a") as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
        (signalled,) = (
            child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank)
        )
        os.kill(signalled.pid, number)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and "--resume" in output, output
    reasons = [line for line in output.splitlines() if line.startswith("mtrl-train: ")]
    assert len(reasons) == 1, output
    return signalled, reasons[0], output


def test_stopped_rank_0_under_torchrun_is_named_by_another_rank_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = {"timeout_s": SILENT_S}
    stopped, reason, output = signal_rank_under_torchrun(tmp_path, 0, signal.SIGSTOP, distributed=limits)
    assert reason.startswith("mtrl-train: rank 0 (") and f"process {stopped.pid})" in reason
    assert f"has shown no sign of life for {SILENT_S:.0f} s" in reason and "continue with --resume" in output
    assert not stopped.is_running(), "the launcher kills it"

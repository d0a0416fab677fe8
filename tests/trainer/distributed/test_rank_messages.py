"""Every failure of a rank is told by name, once: before it is connected, of rank 0 itself, and under torchrun."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

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


def test_stopped_rank_0_of_a_launcher_is_named_by_another_rank_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_tcp_port: int
) -> None:
    """Ranks that are forked with torchrun's variables: under torchrun itself, test_lost_node.py."""
    monkeypatch.chdir(tmp_path)
    limits = {"timeout_s": SILENT_S}
    write_config(engine="torch", prompts=2, n=3, record=False, steps=10_000, distributed=limits)
    metrics, ranks = tmp_path / "runs/a/metrics.jsonl", []
    with ExitStack() as stack:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_tcp_port))
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank in ("0", "1"):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            words = ("-m", "trainer.cli", "--config", "run.yaml", "--out", "runs/a")
            ranks.append(stack.enter_context(run_process(tmp_path, *words)))
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, ranks[0])
        os.kill(ranks[0].pid, signal.SIGSTOP)
        output, _ = ranks[1].communicate(timeout=TIMEOUT_S)
    assert ranks[1].returncode == 1 and "continue with --resume" in output, output
    (reason,) = (line for line in output.splitlines() if line.startswith("mtrl-train: "))
    assert reason.startswith("mtrl-train: rank 0 (") and f"process {ranks[0].pid})" in reason
    assert f"has shown no sign of life for {SILENT_S:.0f} s" in reason

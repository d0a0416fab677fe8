"""A whole training job with two ranks: as one process trains it, and ended by a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import read_run_metrics, write_config
from trainer.policy.shards import has_shards

FACTORS = ("mismatch/factor", "mismatch/rejected")
SETTINGS = {"engine": "torch", "prompts": 2, "n": 3, "record": False}


def test_job_of_two_ranks_trains_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(**SETTINGS, steps=3)
    started = ("--config", "run.yaml", "--out")
    for arguments in (
        (*started, "runs/1", "--steps", "4"),
        (*started, "runs/2", "--ranks", "2"),
        ("--resume", "--out", "runs/2", "--ranks", "1", "--steps", "4"),
    ):
        with run_process(tmp_path, "-m", "trainer.cli", *arguments) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, output
    alone, together = (read_run_metrics(tmp_path / "runs" / ranks) for ranks in ("1", "2"))
    assert len(alone) == len(together) == 4
    assert has_shards(tmp_path / "runs/2/checkpoints/000003")
    for first, second in zip(alone, together, strict=True):
        second.pop("distributed/imbalance", None)
        rounding = {name for name in first if name.startswith("mismatch/")}  # Of engine and trainer, about 1e-6 nats.
        assert all(
            first[name] < 1e-4 and second[name] < 1e-4 for name in rounding - {"mismatch/pass_skipped", *FACTORS}
        )
        compared = first.keys() - rounding
        assert second.keys() == first.keys()
        assert {name: second[name] for name in compared} == pytest.approx(
            {name: first[name] for name in compared}, rel=1e-5, abs=1e-6
        )
    assert not (tmp_path / "runs/2/logs/rank-1.log").exists()


def test_job_whose_ranks_are_killed_starts_again_and_trains_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(**SETTINGS, steps=8)
    metrics = tmp_path / "runs/killed/metrics.jsonl"
    arguments = ("--config", "run.yaml", "--ranks", "2", "--out", "runs/killed")
    with run_process(tmp_path, "-m", "trainer.cli", *arguments) as process:
        for steps, other in ((1, True), (4, False)):
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > steps, process)  # noqa: B023
            (leader,) = psutil.Process(process.pid).children()
            os.kill(find_rank_1(leader).pid if other else leader.pid, signal.SIGKILL)
            if other:
                psutil.wait_procs([leader], TIMEOUT_S)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "was killed by signal 9 (SIGKILL)" in output and "it starts again from step" in output
    with run_process(tmp_path, "-m", "trainer.cli", *arguments[:-1], "runs/undisturbed") as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    killed, undisturbed = (read_run_metrics(tmp_path / "runs" / name) for name in ("killed", "undisturbed"))
    assert [line["step"] for line in killed] == [*range(1, 9)]
    for first, second in zip(killed, undisturbed, strict=True):
        assert first == pytest.approx(second, rel=1e-5, abs=1e-5)


def find_rank_1(leader: psutil.Process) -> psutil.Process:
    children = leader.children(recursive=True)
    (rank,) = (child for child in children if "trainer.distributed.follow" in child.cmdline())
    return rank


def test_killed_rank_ends_the_job_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(**SETTINGS, steps=10_000)
    arguments = ("--config", "run.yaml", "--ranks", "2", "--restarts", "0", "--out", "runs/a")
    metrics = tmp_path / "runs/a/metrics.jsonl"
    with run_process(tmp_path, "-m", "trainer.cli", *arguments) as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
        rank = find_rank_1(psutil.Process(process.pid))
        os.kill(rank.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert f"process {rank.pid}) was killed by signal 9 (SIGKILL)" in output and "--resume" in output
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()][:2] == [1, 2]

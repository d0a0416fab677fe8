"""A whole training job with two ranks: as one process trains it, and ended by a rank that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import count_lines, read_run_metrics, write_config
from trainer.policy.shards import has_shards
from trainer.storage.run_files import read_metrics

STEPS = 8
SILENT_S = 10.0
FACTORS = ("mismatch/factor", "mismatch/rejected")
SETTINGS = {"engine": "torch", "prompts": 2, "n": 3, "record": False}


SPOIL = """
import math, torch
from trainer.distributed.lead import LeadUpdater
train_step = LeadUpdater.train_step

def train_spoiled(self, batch):
    if self._policy.steps:
        with torch.no_grad():
            next(self._policy.model.parameters()).fill_(math.nan)
    return train_step(self, batch)

LeadUpdater.train_step = train_spoiled

def spoil(attempt):
    return float(attempt.rollout.index)
"""
"""A reward whose module fills weights with NaN before the second step."""
ROUNDED = "mismatch/"  # Of engine and trainer, about 1e-6 nats.


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The metrics of one process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_config(**SETTINGS, steps=STEPS)
    train(folder)
    return read_run_metrics(folder / "runs/a")


def train(folder: Path, *arguments: str) -> None:
    with run_process(folder, "-m", "trainer.cli", "--config", "run.yaml", "--out", "runs/a", *arguments) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output


def require_equal(ours: list[dict[str, float]], alone: list[dict[str, float]]) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in alone]
    for first, second in zip(alone, ours, strict=True):
        second.pop("distributed/imbalance", None)
        rounding = {name for name in first if name.startswith(ROUNDED)}
        assert all(
            first[name] < 1e-4 and second[name] < 1e-4 for name in rounding - {"mismatch/pass_skipped", *FACTORS}
        )
        compared = first.keys() - rounding
        assert second.keys() == first.keys()
        assert {name: second[name] for name in compared} == pytest.approx(
            {name: first[name] for name in compared}, rel=1e-5, abs=1e-6
        )


def test_job_whose_rank_0_is_killed_and_then_stopped_trains_on_and_resumes_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: list[dict[str, float]]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(**SETTINGS, steps=STEPS - 1, distributed={"timeout_s": SILENT_S})
    run = tmp_path / "runs/a"
    arguments = ("--config", "run.yaml", "--ranks", "2", "--out", "runs/a")
    with run_process(tmp_path, "-m", "trainer.cli", *arguments) as process:
        lines = 0
        for number in (signal.SIGKILL, signal.SIGSTOP):
            lines = count_lines(run) + 2
            wait_until(lambda: count_lines(run) >= lines, process)  # noqa: B023 (called at once)
            (leader,) = psutil.Process(process.pid).children()
            others = leader.children(recursive=True)
            os.kill(leader.pid, number)
            gone, alive = psutil.wait_procs([leader, *others], timeout=TIMEOUT_S)
            assert len(gone) > 1 and not alive
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert output.count("the training was killed by signal 9; it starts again from step") == 2
    assert f"process {leader.pid}) has shown no sign of life for {SILENT_S:g} s" in output
    assert sum(line["distributed/restarts"] for line in read_metrics(run / "metrics.jsonl")) == 2
    assert has_shards(run / f"checkpoints/{STEPS - 1:06}")
    train(tmp_path, "--resume", "--ranks", "1", "--steps", str(STEPS))
    require_equal(read_run_metrics(run), alone)


def test_run_whose_weights_become_nan_ends_with_code_2_and_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spoil.py").write_text(SPOIL)
    write_config(**SETTINGS, steps=4, reward={"components": {"spoil": {"function": "spoil.py:spoil"}}})
    with run_process(tmp_path, "-m", "trainer.cli", "--config", "run.yaml", "--ranks", "2", "--out", "a") as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2 and "lower `update.lr`" in output, output
    assert "nan" in output and "starts again" not in output, output

"""The best checkpoint by its evaluation is kept, and disk space for checkpoints is forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.policy.tiny_policies import pack_sequences, tiny_model
from tests.trainer.train.jobs import demo_model, small_job
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, LoraSettings, UpdateSettings
from trainer.train.checkpoint import (
    BEST_FILE,
    BestCheckpoint,
    Checkpoints,
    estimate_checkpoint,
    forecast_checkpoints,
    measured_value,
)

WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Wide enough that a checkpoint's weights are much larger than its settings."""


def test_the_best_checkpoint_outlives_the_latest_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, {}, lambda folder: None)
        checkpoints.best_step = 2 if step >= 2 else None
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").iterdir())] == ["000002", "000005", "000006"]
    latest = checkpoints.find_latest()
    assert latest and latest.step == 6


def test_only_a_better_evaluation_makes_a_checkpoint_the_best(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path)
    assert best.is_improved_by(0.0) and not best.is_improved_by(None)
    best.record(0, 0.4)
    assert not best.is_improved_by(0.4) and best.is_improved_by(0.5)
    best.record(10, 0.5)
    assert BestCheckpoint(tmp_path, step=20).step == 10


def test_an_evaluation_that_an_outage_cut_down_is_not_compared() -> None:
    assert measured_value({"eval/greedy": 1.0, "eval/tasks": 3.0, "eval/lost": 13.0}) is None
    assert measured_value({"eval/greedy": 0.5, "eval/tasks": 15.0, "eval/lost": 1.0}) == 0.5
    assert measured_value({"eval/tasks": 0.0, "eval/lost": 16.0}) is None and measured_value({}) is None


def test_a_run_that_goes_back_before_its_best_step_finds_the_best_again(tmp_path: Path) -> None:
    BestCheckpoint(tmp_path).record(10, 0.9)
    assert BestCheckpoint(tmp_path, step=7).is_improved_by(0.1)
    (tmp_path / BEST_FILE).write_text("{")
    assert BestCheckpoint(tmp_path, step=20).is_improved_by(0.1), "a damaged file costs only the memory of the best"


def test_checkpoints_that_will_not_fit_on_the_disk_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.checkpoint._free_bytes", lambda folder: 100 * 2**30)
    job = small_job(checkpoint={"keep": 3})
    assert forecast_checkpoints(job, demo_model(), 1_000_000_000, tmp_path) is None
    problem, remedy = forecast_checkpoints(job, demo_model(), 8_000_000_000, tmp_path) or ("", "")
    assert "up to 447.0 GiB: 89.4 GiB for each of the latest 3, the best one and the one" in problem
    assert "100.0 GiB are free" in problem and remedy.startswith("lower `checkpoint.keep`, free some space")


def test_adapters_take_little_space_and_a_critic_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.checkpoint._free_bytes", lambda folder: 10 * 2**30)
    for more, fits in (({"lora": LoraSettings()}, True), ({"lora": LoraSettings(), "critic": CriticSettings()}, False)):
        job = small_job()
        job = job.model_copy(update={"update": job.update.model_copy(update=more)})
        assert (forecast_checkpoints(job, demo_model(), 8_000_000_000, tmp_path) is None) is fits


@pytest.mark.parametrize(
    "more",
    [{}, {"lora": LoraSettings()}, {"lora": LoraSettings(rank=4, targets=("q_proj", "down_proj"))}],
    ids=["whole", "adapters", "some adapters"],
)
def test_forecast_is_close_to_the_size_of_a_saved_checkpoint(tmp_path: Path, more: dict[str, LoraSettings]) -> None:
    update = UpdateSettings(lr=1e-3, **more)  # type: ignore[arg-type]
    source = tiny_model(**WIDE)
    source.save_pretrained(tmp_path / "model")
    policy = Policy(source, update)
    policy.compute_batch_logprobs(*pack_sequences([[1, 2, 3]])).logprobs_T.sum().backward()
    policy.step()
    policy.save(tmp_path / "checkpoint")
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir())
    parameters = sum(value.numel() for value in tiny_model(**WIDE).parameters())
    assert estimate_checkpoint(update, tmp_path / "model", parameters) == pytest.approx(saved, rel=0.1)

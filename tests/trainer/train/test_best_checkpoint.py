"""The best checkpoint by its evaluation is kept."""

from __future__ import annotations

from pathlib import Path

from trainer.train.checkpoint import BEST_FILE, BestCheckpoint, Checkpoints, measured_value


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

"""A run ends before its last step once its model succeeds often enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.trainer.train.trainings import Run, list_checkpoints, read_run_metrics, user_reward, write_config
from trainer.train.early_stop import EarlyStop
from trainer.train.settings import EarlyStopSettings, TrainSettings


def ends(settings: EarlyStopSettings | None, *history: dict[str, float]) -> bool:
    return EarlyStop(settings, history).reason is not None


def sampled(*values: float) -> list[dict[str, float]]:
    return [{"step": float(step), "success/sampled": value} for step, value in enumerate(values, 1)]


def evaluated(value: float, *, tasks: int = 50, lost: int = 0) -> dict[str, float]:
    return {"eval/greedy": value, "eval/tasks": float(tasks), "eval/lost": float(lost)}


def test_success_in_training_is_the_mean_of_a_full_window() -> None:
    settings = EarlyStopSettings(training=0.9)
    assert not ends(settings, *sampled(1, 1, 1, 1))
    assert ends(settings, *sampled(0, 0, 1, 1, 1, 1, 0.6))
    assert not ends(settings, *sampled(1, 1, 1, 1, 1, 0.4))
    assert not ends(None, *sampled(1, 1, 1, 1, 1))


def test_only_an_evaluation_that_is_whole_ends_a_run() -> None:
    settings = EarlyStopSettings(evaluation=0.9)
    assert ends(settings, evaluated(0.9)) and not ends(settings, evaluated(0.89))
    assert not ends(settings, evaluated(1.0, tasks=5, lost=45))
    assert not ends(settings, *sampled(1, 1, 1, 1, 1))


def test_a_run_goes_on_until_both_bounds_hold() -> None:
    settings, learned = EarlyStopSettings(training=0.5, evaluation=0.9), sampled(1, 1, 1, 1, 1)
    assert not ends(settings, *learned) and not ends(settings, evaluated(1.0))
    assert ends(settings, evaluated(1.0), *learned)


@pytest.mark.parametrize(
    "changes", [{"early_stop": {}}, {"early_stop": {"evaluation": 0.9}, "evaluation": {"every": 0}}]
)
def test_a_bound_that_could_never_be_reached_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"early_stop"):
        TrainSettings.model_validate(changes)


def test_a_run_that_has_learned_ends_evaluated_and_saved_and_is_not_begun_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.train.early_stop.WINDOW", 2)
    config = write_config(
        reward=user_reward("return 1.0"), early_stop={"training": 1}, steps=9,
        evaluation={"every": 5, "rows": 1, "final_rows": 1}, algorithm={"name": "grpo"},
    )  # fmt: skip
    output = run("--config", config, "--out", "r")
    assert "the run ends after step 2 of 9: 100.0% of the last 2 steps' rollouts succeeded" in output
    assert "2 steps are finished" in output
    metrics = read_run_metrics("r")
    assert [line["step"] for line in metrics] == [0, 1, 2] and metrics[-1]["eval/tasks"] == 1
    assert list_checkpoints("r")[-1] == "000002"
    assert "the run ends after step 2 of 9" in run("--resume", "--out", "r")
    assert len(read_run_metrics(Path("r"))) == 3

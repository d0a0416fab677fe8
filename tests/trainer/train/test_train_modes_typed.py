"""Modes as somebody types them."""

from __future__ import annotations

import pytest

from tests.trainer.train.trainings import Run, config, mine


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
def test_where_nothing_can_be_scored_a_run_that_is_ahead_ends_too_and_says_why(run: Run, mode: str) -> None:
    file = config(mode=mode, steps=9, reward=mine("raise RuntimeError('no idea')"))
    told = run("--config", file, "--out", "r", code=2)
    assert "nothing of the last 3 steps could be scored" in told and "no idea" in told


def test_a_mode_may_be_typed_and_one_that_is_none_is_refused(run: Run) -> None:
    told = run("--config", config(steps=1), "--out", "r", "--mode", "one_step_off")
    assert "one step off: a step's rollouts are made while the one before it learns" in told
    assert "step 1 of 1" in told and "--mode" in run("--config", config(), "--mode", "ahead", code=2)

"""Training modes as options of the command line."""

from __future__ import annotations

import pytest

from tests.trainer.train.trainings import Run, user_reward, write_config


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
def test_async_run_stops_with_reasons_when_no_group_can_be_scored(run: Run, mode: str) -> None:
    file = write_config(mode=mode, steps=9, reward=user_reward("raise RuntimeError('no idea')"))
    output = run("--config", file, "--out", "r", code=2)
    assert "no rollout of step 1 could be scored" in output and "no idea" in output


def test_mode_is_an_option_and_unknown_modes_are_refused(run: Run) -> None:
    output = run("--config", write_config(steps=1), "--out", "r", "--mode", "one_step_off")
    assert "one step off: a step's rollouts are made during the previous step" in output
    assert "step 1 of 1" in output and "--mode" in run("--config", write_config(), "--mode", "ahead", code=2)

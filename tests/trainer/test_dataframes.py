"""Tests the data frames of a run."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

from tests.browser.sample_run import write_sample_run
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.view import load


def test_run_becomes_three_tables(tmp_path: Path) -> None:
    tables = load(write_sample_run(tmp_path / "run", steps=3))
    assert list(tables.steps.index) == [0, 1, 2, 3] and "reward/mean" in tables.steps
    assert len(tables.rollouts) == 48
    scored = tables.rollouts[tables.rollouts.stop == "feedback_done"]
    assert ((scored["reward/right"] + 0.1 * scored["reward/brief"] - scored.reward).abs() < 1e-9).all()
    assert set(scored.kind) == {"near", "far"}
    assert isnan(tables.rollouts[tables.rollouts.stop == "tool_failed"].reward.item())
    drawing_calls = tables.calls[tables.calls.name == "draw_bars"]
    assert (
        set(drawing_calls.turn) == {1}
        and set(drawing_calls.outcome) == {"ok"}
        and set(drawing_calls.elapsed_s) == {0.31}
    )
    assert tables.rollouts.calls.sum() == len(tables.calls)


def test_rollouts_are_joined_with_their_steps(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", steps=3)
    first = Rollouts(run)[0]
    with RolloutWriter(run) as writer:
        writer.add(replace(first, group="0-1-7", step=2))
        writer.add(replace(first, group="e-1"))
    tables = load(run)
    assert list(tables.rollouts.groupby("step").size()) == [16, 17, 16]
    assert isnan(tables.rollouts.step.iloc[-1])
    joined = tables.rollouts.join(tables.steps["reward/mean"], on="step")
    assert (joined["reward/mean"].isna() == joined.step.isna()).all()
    scored = tables.rollouts[tables.rollouts.stop == "feedback_done"]
    assert (scored.success == scored["reward/right"]).all() and not scored.success.isna().any()
    assert tables.rollouts[tables.rollouts.stop == "tool_failed"].success.isna().all()

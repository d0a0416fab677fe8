"""A run as tables."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

from typer.testing import CliRunner

from tests.browser.made_run import made
from trainer.cli import app
from trainer.run.file import Rollouts, Writer
from trainer.view import load


def test_a_run_is_three_tables(tmp_path: Path) -> None:
    frames = load(made(tmp_path / "run", steps=3))
    assert list(frames.steps.index) == [0, 1, 2, 3] and "reward/mean" in frames.steps
    assert len(frames.rollouts) == 48
    scored = frames.rollouts[frames.rollouts.stop == "feedback_done"]
    assert ((scored["reward/right"] + 0.1 * scored["reward/brief"] - scored.reward).abs() < 1e-9).all()
    assert set(scored.kind) == {"near", "far"}
    assert isnan(frames.rollouts[frames.rollouts.stop == "tool_failed"].reward.item())
    drawn = frames.calls[frames.calls.name == "draw_bars"]
    assert set(drawn.turn) == {1} and set(drawn.outcome) == {"ok"} and set(drawn.elapsed_s) == {0.31}
    assert frames.rollouts.calls.sum() == len(frames.calls)


def test_rollouts_are_joined_with_the_steps_that_learned_from_them(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=3)
    first = Rollouts(run)[0]
    with Writer(run) as writer:
        writer.add(replace(first, group="0-1-7", step=2))
        writer.add(replace(first, group="e-1"))
    frames = load(run)
    assert list(frames.rollouts.groupby("step").size()) == [16, 17, 16]
    assert isnan(frames.rollouts.step.iloc[-1])
    joined = frames.rollouts.join(frames.steps["reward/mean"], on="step")
    assert (joined["reward/mean"].isna() == joined.step.isna()).all()
    scored = frames.rollouts[frames.rollouts.stop == "feedback_done"]
    assert (scored.success == scored["reward/right"]).all() and not scored.success.isna().any()
    assert frames.rollouts[frames.rollouts.stop == "tool_failed"].success.isna().all()


def test_an_evaluation_has_the_success_of_its_run(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=1)
    with Writer(run / "eval" / "greedy") as writer:
        writer.add(replace(Rollouts(run)[0], group="e-0"))
    assert load(run / "eval" / "greedy").rollouts.success.item() in (0, 1)


def test_curves_are_drawn_as_svg_where_the_file_is_called_so(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=3)
    done = CliRunner().invoke(app, ["plot", str(run), "--out", str(tmp_path / "curves.svg")])
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert ">Reward<" in (tmp_path / "curves.svg").read_text()

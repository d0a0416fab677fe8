"""Tests `plot`: charts in terminals of any width."""

from __future__ import annotations

import io
from math import nan
from pathlib import Path

import pytest
from rich.console import Console

from trainer.storage.run_files import dump_metrics
from trainer.view.plot import build_charts, plot_run

STEP = {
    "reward/mean": 0.5,
    "reward/outcome": 0.4,
    "reward/tools": 0.1,
    "reward/std": 0.3,
    "success/sampled": 0.5,
    "entropy": 0.7,
    "kl/old": 1e-5,
    "mismatch/kl": 0.0,
    "rollout/tokens": 60.0,
    "rollout/turns": 2.0,
    "rollout/calls": 1.0,
    "update/grad_norm": 0.9,
    "time/rolling_out_s": 2.0,
    "time/learning_s": 1.0,
    "time/tools/search/p95_s": 9.0,
    "engine/tokens/written": 900.0,
}


def write_metrics(folder: Path, steps: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    before = dump_metrics(0, {"eval/greedy": 0.3, "eval/sampled": 0.2})
    lines = [dump_metrics(step, STEP | ({"eval/greedy": 0.9} if step == steps else {})) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_bytes(before + b"".join(lines) + b'{"step": 99, "rew')
    return folder


def plot_text(run: Path, width: int) -> str:
    screen = io.StringIO()
    plot_run(run, Console(file=screen, width=width, height=40))
    return screen.getvalue()


@pytest.mark.parametrize("width", [40, 120])
def test_terminal_of_any_width_shows_all_charts(tmp_path: Path, width: int) -> None:
    text = plot_text(write_metrics(tmp_path), width)
    for title in (
        "Reward, ",
        "Success, ",
        "Entropy, ",
        "KL and mismatch, ",
        "Length, ",
        "Turns and calls, ",
        "Gradient, ",
    ):
        assert title in text
    for label in ("reward 0.5", "tools 0.1", "held out, greedy 0.9", "KL of a step 1e-05", "rolling out "):
        assert label in text
    assert "67% 10.0 s" in text and "search" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_non_finite_values_are_gaps() -> None:
    history = [{"step": step, "entropy": nan if step == 2 else 0.5, "kl/old": step - 2.0} for step in range(1, 5)]
    entropy, kl = build_charts(history)
    assert [step for step, _ in entropy.curves[0].points] == [1, 3, 4]
    assert [step for step, _ in kl.curves[0].points] == [3, 4]  # Logarithmic scale.

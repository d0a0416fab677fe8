"""Tests the live progress of training: panel, log lines, time per phase and sparklines."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from gateway.types import Outcome
from trainer.engine.base import Generation
from trainer.ledger import Author, Ledger
from trainer.rollout.observer import RolloutObserver
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import Step
from trainer.view.training_progress import TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class RecordedProgress(TrainingProgress):
    """Training progress on a string stream, with a manual clock."""

    def __init__(self, steps: int = 10, *, terminal: bool = False, width: int = 80, **options: object) -> None:
        self.screen, self.clock = io.StringIO(), Clock()
        console = Console(file=self.screen, width=width, height=24, force_terminal=terminal, _environ={})
        super().__init__(steps, console=console, now=self.clock, **options)  # type: ignore[arg-type]

    def panel_lines(self, *, over: bool = False) -> list[str]:
        screen = io.StringIO()
        console = Console(file=screen, width=self.console.width, height=24)
        console.print(self.render(over=over))
        return screen.getvalue().splitlines()

    def spend_time(self, phase: str, seconds: float) -> None:
        with self.phase(phase):
            self.clock.now += seconds

    def run_rollouts(self, count: int, evaluation_counters: RolloutObserver | None = None) -> None:
        watch = evaluation_counters or self
        for index in range(count):
            key = f"1-0-0/t/{index}"
            watch.on_state(key, "generating")
            watch.on_generation(key, Generation((1,) * 10, (0.0,) * 10, "stop", cached_tokens=50), 100)
            call = {"name": "search", "outcome": "ok", "elapsed_s": 0.5}
            watch.on_step(key, Step(Author.TOOL, outcomes=(Outcome.OK,), info={"tools": [call]}), 0.5)
            watch.on_end(key, Rollout("t", Ledger(), StopReason.DONE))

    def run_step(self, step: int, **metrics: float) -> dict[str, float]:
        """Simulates a step of 4 seconds; metrics by `area__name`."""
        self.begin(step, 8)
        with self.phase("rolling_out"):
            self.run_rollouts(8)
            self.clock.now += 3
        self.spend_time("learning", 1)
        measured = {name.replace("__", "/"): value for name, value in metrics.items()} | self.take_metrics()
        self.end_step(step, measured)
        return measured


def test_panel_fits_eighty_columns() -> None:
    progress = RecordedProgress()
    progress.end_step(0, {"eval/greedy": 0.3})
    for step in range(1, 5):
        progress.run_step(
            step,
            reward__mean=step / 10,
            reward__std=0.5,
            reward__outcome=step / 8,
            reward__tools=0.05,
            success__sampled=step / 5,
            entropy=0.41,
            kl__old=1e-5,
            mismatch__mean=1.8e-7,
            update__grad_norm=0.83,
            **({"eval__greedy": 0.8} if step == 4 else {}),
        )
    progress.begin(5, 8)
    with progress.phase("rolling_out"):
        progress.run_rollouts(2)
        progress.clock.now += 1.5
        lines = progress.panel_lines()
    assert [re.sub(r"[━╸╺]+ *", "━ ", line.strip("│ ")) for line in lines[1:10]] == [
        "step     ━ 4 of 10",
        "phase    rolling out · 1.5 s · about 0:06 left of the step",
        "reward   0.400 ▁▃▆█ · outcome 0.5 · tools 0.05",
        "success  sampled 80% ▁▃▆█ · greedy 80% after step 4",
        "policy   entropy 0.41 · KL 1e-05 · mismatch 1.8e-07 · grad norm 0.83",
        "time     4.0 s a step · rolling out 75% · learning 25%",
        "idle     trainer 75% · engine 100%",
        f"rollouts of step 5 {'─' * 55}",
        "rollouts ━ 2 of 8",
    ]
    assert lines[0].endswith(" 0:18, 0:22 left ─╮")


def test_time_is_accounted_to_the_innermost_phase() -> None:
    progress = RecordedProgress()
    with progress.phase("evaluating"):
        progress.clock.now += 1
        progress.spend_time("scoring", 2)
        progress.clock.now += 4
        assert progress.take_metrics() == {"time/evaluating_s": 5, "time/scoring_s": 2}
        progress.clock.now += 8
    assert progress.take_metrics() == {"time/evaluating_s": 8}


def test_evaluation_rollouts_are_counted_separately() -> None:
    progress = RecordedProgress()
    progress.begin(1, 8)
    progress.run_rollouts(8)
    with progress.phase("evaluating", rollouts=50) as evaluation_counters:
        progress.run_rollouts(3, evaluation_counters)
        assert any("3 of 50" in line for line in progress.panel_lines())
        assert any("rollouts, evaluating" in line for line in progress.panel_lines())
    assert any("8 of 8" in line for line in progress.panel_lines())
    assert progress.take_metrics()["engine/rollouts/ended"] == 8
    progress.begin(2, 8)
    assert any("0 of 8" in line for line in progress.panel_lines())
    progress.add_rollouts(4)
    assert any("0 of 12" in line for line in progress.panel_lines())


def test_engine_is_not_idle_while_a_rollout_generates_or_others_are_evaluated() -> None:
    progress = RecordedProgress()
    progress.begin(1, 1)
    with progress.phase("rolling_out"):
        progress.run_rollouts(1)
        progress.on_state("1-0-0/t/5", "generating")
        progress.clock.now += 6
        progress.on_state("1-0-0/t/5", "calling")
        progress.clock.now += 2
    progress.spend_time("evaluating", 4)
    assert progress.take_metrics()["idle/engine"] == pytest.approx(0.25)

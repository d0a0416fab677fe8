"""Tests the live progress of training: panel, log lines, time per phase and sparklines."""

from __future__ import annotations

import io
import re
import threading
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.types import Outcome
from trainer.engine.base import Generation
from trainer.ledger import Author, Ledger
from trainer.rollout.observer import RolloutObserver
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import Step
from trainer.view.terminal_chart import BLOCKS, Trend
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
    assert [re.sub(r"[━╸╺]+ *", "━ ", line.strip("│ ")) for line in lines[1:-1]] == [
        "step     ━ 4 of 10",
        "phase    rolling out · 1.5 s · about 0:06 left of the step",
        "reward   0.400 ▁▃▆█ · outcome 0.5 · tools 0.05",
        "success  sampled 80% ▁▃▆█ · greedy 80% after step 4",
        "policy   entropy 0.41 · KL 1e-05 · mismatch 1.8e-07 · grad norm 0.83",
        "time     4.0 s a step · rolling out 75% · learning 25%",
        "idle     trainer 75% · engine 100%",
        f"rollouts of step 5 {'─' * 55}",
        "rollouts ━ 2 of 8",
        "now      0 pending · 0 generating · 0 calling · 0 interacting",
        "tokens   13 per s · 20 in 2 turns · cached 67% of possible",
        "slowest  search · p50 500 ms · p95 500 ms · max 500 ms · 2 calls",
        "answers  2 ok",
        "ended    2 done",
    ]
    assert lines[0].endswith(" 0:18, 0:22 left ─╮")


@pytest.mark.parametrize("width", [30, 80, 120, 300])
def test_panel_has_constant_size(width: int) -> None:
    fresh, running, over = RecordedProgress(width=width), RecordedProgress(width=width), RecordedProgress(width=width)
    for recorded in (running, over):
        recorded.run_step(
            1, reward__mean=1e-5, reward__long_name=123456.0, success__sampled=1.0, entropy=nan, kl__old=1e9
        )
    shown = fresh.panel_lines(), running.panel_lines(), over.panel_lines(over=True)
    assert {len(lines) for lines in shown} == {16}
    assert {len(line) for lines in shown for line in lines} == {min(width - 2, 100)}
    assert "over after" in "".join(shown[2])


def test_panel_uses_standard_colours_only() -> None:
    progress = RecordedProgress(terminal=True)
    progress.run_step(1, reward__mean=0.5)
    progress.console.print(progress.render(over=False))
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", progress.screen.getvalue()) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "31", "32", "39", "90"}


def test_time_of_a_phase_is_reported_once() -> None:
    progress = RecordedProgress()
    metrics = progress.run_step(1)
    assert metrics["time/rolling_out_s"] == 3 and metrics["time/learning_s"] == 1
    progress.spend_time("saving", 2)
    assert progress.take_metrics()["time/saving_s"] == 2
    assert not any(name.startswith("time/saving") for name in progress.take_metrics())


def test_time_is_accounted_to_the_innermost_phase() -> None:
    progress = RecordedProgress()
    with progress.phase("evaluating"):
        progress.clock.now += 1
        progress.spend_time("scoring", 2)
        progress.clock.now += 4
        assert progress.take_metrics() == {"time/evaluating_s": 5, "time/scoring_s": 2}
        progress.clock.now += 8
    assert progress.take_metrics() == {"time/evaluating_s": 8}


def test_time_of_a_failing_phase_is_reported() -> None:
    progress = RecordedProgress()
    with pytest.raises(ValueError), progress.phase("learning"):
        progress.clock.now += 3
        raise ValueError
    assert progress.take_metrics() == {"time/learning_s": 3}
    assert "between two" in "".join(progress.panel_lines())


def test_rollout_metrics_are_in_areas_time_and_engine() -> None:
    progress = RecordedProgress()
    metrics = progress.run_step(1)
    assert {name.partition("/")[0] for name in metrics} == {"time", "engine", "idle"}
    assert metrics["engine/tokens/written"] == 80
    assert metrics["engine/tokens/written_per_s"] == pytest.approx(80 / 3)
    assert metrics["engine/tokens/cached_of_possible"] <= 1
    assert metrics["engine/stops/done"] == metrics["engine/tools/search/count"] == 8
    assert metrics["time/tools/search/p95_s"] == pytest.approx(0.5, rel=0.03)
    assert not any("left" in name or "elapsed" in name or "generating" in name for name in metrics)


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


def test_running_rollouts_are_kept_across_steps_and_evaluations() -> None:
    progress = RecordedProgress()
    progress.begin(1, 0)
    progress.on_state("0-0-0/t/0", "generating")
    with progress.phase("evaluating", rollouts=2) as evaluation_counters:
        progress.run_rollouts(2, evaluation_counters)
        progress.on_state("0-0-0/t/0", "calling")
        assert any("0 calling" in line for line in progress.panel_lines())
    progress.begin(2, 0)
    assert any("1 calling" in line for line in progress.panel_lines())
    progress.on_end("0-0-0/t/0", Rollout("t", Ledger(), StopReason.DONE))
    assert any("0 calling" in line for line in progress.panel_lines())
    assert any(line.startswith("│ rollouts 1 ") for line in progress.panel_lines())


def test_remaining_time_uses_recent_steps() -> None:
    progress = RecordedProgress(10)
    assert progress.left_s is None
    progress.spend_time("warming", 1000)
    progress.end_step(0, {"eval/greedy": 0.1})
    for step in range(1, 5):
        progress.run_step(step)
        assert progress.left_s == 4 * (10 - step)
    progress.clock.now += 3
    assert progress.left_s == 4 * 6 - 3
    for step in range(5, 11):
        progress.run_step(step)
    assert progress.left_s is None


def test_resumed_run_shows_its_history() -> None:
    history = [{"step": step, "reward/mean": step / 10, "time/learning_s": 2.0} for step in range(6)]
    progress = RecordedProgress(10, history=history)
    shown = "\n".join(progress.panel_lines())
    assert "5 of 10" in shown and "▁▂▄▅▇█" in shown and "2.0 s a step" in shown
    assert progress.screen.getvalue() == ""


def test_without_terminal_each_step_is_a_line() -> None:
    with RecordedProgress() as progress:
        progress.end_step(0, {"eval/greedy": 0.3, "time/evaluating_s": 2.0})
        progress.run_step(
            1, reward__mean=0.25, reward__outcome=0.2, reward__tools=0.05, success__sampled=0.2, kl__old=1e-6
        )
        progress.run_step(2)
        progress.print_message("look out\n  remedy: do something")
    assert progress.screen.getvalue().splitlines() == [
        "step 0 of 10; greedy 30% before the first step; evaluating 2.0 s; 0:00",
        "step 1 of 10; reward 0.250 (outcome 0.2, tools 0.05); sampled 20%, greedy 30% before the first step; KL 1e-06;"
        " rolling out 3.0 s, learning 1.0 s; 0:04, 0:36 left",
        "step 2 of 10; greedy 30% before the first step; rolling out 3.0 s, learning 1.0 s; 0:08, 0:32 left",
        "look out",
        "  remedy: do something",
    ]


def test_long_step_is_logged_at_intervals() -> None:
    progress = RecordedProgress()
    progress.begin(1, 8)
    with progress.phase("rolling_out"):
        progress.run_rollouts(2)
        progress.clock.now += 59
        assert progress.format_line(over=False) == ""
        progress.clock.now += 1
        begins = "step 1 of 10; rolling out for 1:00, about 3:00 left of the rollouts; 2 of 8 rollouts; "
        assert progress.format_line(over=False).startswith(begins)
        assert progress.format_line(over=False) == ""
        progress.clock.now += 61
        assert progress.format_line(over=True) == ""


def test_messages_are_printed_above_the_panel() -> None:
    with RecordedProgress(terminal=True) as progress:
        progress.print_message("look \x1b[31mout[/bold]")
        progress.run_step(1, reward__mean=0.5)
    text = progress.screen.getvalue()
    assert text.index("look \\x1b[31mout[/bold]") < text.rindex("╭")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_component_name_is_escaped() -> None:
    progress = RecordedProgress()
    progress.run_step(1, reward__mean=0.5, **{"reward__\x1b[31mred": 0.5, "reward__other": 0.5})
    assert "\x1b" not in "".join(progress.panel_lines()) + progress.screen.getvalue()


def test_closed_terminal_does_not_end_the_run() -> None:
    with RecordedProgress() as progress:
        progress.screen.close()
        progress.print_message("nobody hears it")
        metrics = progress.run_step(1)
    assert metrics["time/learning_s"] == 1


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 20))
def test_sparkline_has_bounded_width_and_memory(values: list[float], width: int) -> None:
    trend = Trend(width)
    for value in [*values, nan]:
        trend.add(value)
    shown = str(trend)
    assert len(shown) <= width and set(shown) <= set(BLOCKS)
    assert bool(shown) == bool(values)
    assert len(trend._means) + len(trend._pending) <= 2 * width + len(values) // width + 1


def test_sparkline_rises_with_its_values() -> None:
    rising, falling = Trend(8), Trend(8)
    for step in range(1000):
        rising.add(step)
        falling.add(-step)
    assert str(rising) == "".join(sorted(str(rising))) and str(rising)[0] == "▁" and str(rising)[-1] == "█"
    assert str(falling) == "".join(sorted(str(falling), reverse=True))


def test_staleness_is_shown_when_rollouts_run_ahead() -> None:
    progress = RecordedProgress(width=120)
    progress.run_step(1, rollout__staleness=0.0, entropy=0.4)
    assert not any("staleness" in line for line in progress.panel_lines())
    progress.run_step(2, rollout__staleness=1.25, staleness__max=2.0, staleness__dropped=3.0, entropy=0.4)
    assert any("staleness 1.25, at most 2 · 3 groups dropped" in line for line in progress.panel_lines())


def test_panel_says_who_waits_for_whom() -> None:
    progress = RecordedProgress(width=110)
    shares = {"distributed__idle__rank_0": 0.0, "distributed__idle__rank_3": 0.25, "distributed__imbalance": 1.08}
    measured = progress.run_step(1, **shares, workers__idle__near=0.5, workers__idle__far=0.9)
    assert measured["idle/trainer"] == 0.75 and measured["idle/engine"] == 1.0
    (idle,) = [line for line in progress.panel_lines() if "idle" in line]
    assert "trainer 75% · engine 100% · rank 0 0% to rank 3 25% · worker near 50% to worker far 90" in idle


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

"""Tests the counters of rollouts, the live progress of rollouts and of training, and the status in a run's folder."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from pathlib import Path
from threading import Event

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
from trainer.storage.run_status import STATUS_FILE, RunStatus, StatusFile, read_status
from trainer.view.counters import Durations, RolloutCounters
from trainer.view.panel import format_status, rollout_panel
from trainer.view.progress import RolloutProgress
from trainer.view.training_progress import TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_generation(count: int, cached: int = 0) -> Generation:
    return Generation((1,) * count, (0.0,) * count, "stop", cached_tokens=cached)


def make_step(name: str, outcome: Outcome = Outcome.OK, seconds: float = 0.1) -> Step:
    metrics = {"name": name, "outcome": outcome.value, "elapsed_s": seconds}
    return Step(Author.TOOL, outcomes=(outcome,), info={"tools": [metrics]})


def make_rollout(stop: StopReason = StopReason.DONE) -> Rollout:
    return Rollout("t", Ledger(), stop)


def make_counters() -> tuple[RolloutCounters, Clock]:
    """Counters in which two of four rollouts have ended, one of them is retried, and one waits for a tool."""
    counters = RolloutCounters(4, clock=(clock := Clock()))
    for key in ("0/a.1/t/0", "0/a.1/t/1", "0/a.1/t/2"):
        counters.on_state(key, "pending")
        counters.on_state(key, "generating")
    counters.on_generation("0/a.1/t/0", make_generation(10), 100)
    counters.on_state("0/a.1/t/0", "calling")
    counters.on_step("0/a.1/t/0", make_step("search", Outcome.TIMEOUT, 2.0), 2.0)
    counters.on_step("0/a.1/t/0", make_step("no_such_tool", Outcome.INVALID, 9.0), 9.0)
    counters.on_end("0/a.1/t/0", make_rollout(StopReason.TOOL_FAILED))
    counters.on_state("0/a.1/t/0.1", "pending")
    counters.on_generation("0/a.1/t/1", make_generation(20, cached=99), 100)
    counters.on_step("0/a.1/t/1", Step(outcomes=(Outcome.OK,), source="gsm8k"), 0.5)
    counters.on_generation("0/a.1/t/1", make_generation(5, cached=100), 130)
    counters.on_end("0/a.1/t/1", replace(make_rollout(StopReason.FEEDBACK_DONE), infos={"drift": {"whitespace": 2}}))
    counters.on_state("0/a.1/t/2", "calling")
    clock.now += 10
    return counters, clock


def test_counters_become_metrics() -> None:
    metrics = make_counters()[0].metrics()
    expected = {
        "rollouts/pending": 1, "rollouts/generating": 0, "rollouts/calling": 1, "rollouts/interacting": 0,
        "rollouts/ended": 1, "rollouts/refilled": 1, "turns/count": 3, "tokens/written": 35, "tokens/asked": 330,
        "tokens/cached": 199, "tokens/possible": 99 + 119, "tokens/written_per_s": 3.5,
        "tokens/cached_of_possible": 199 / 218, "tokens/cached_of_possible_worst_group": 199 / 218,
        "tokens/cached_of_possible_turn_1": 99 / 99, "tokens/cached_of_possible_turn_2": 100 / 119,
        "time/elapsed_s": 10, "time/left_s": 15.0, "stops/tool_failed": 1, "stops/feedback_done": 1,
        "outcomes/timeout": 1, "outcomes/invalid": 1, "outcomes/ok": 1, "drift/whitespace": 2,
        "tools/search/timeout": 1, "tools/feedback gsm8k/ok": 1,
    }  # fmt: skip
    for name, seconds in (("search", 2.0), ("feedback gsm8k", 0.5)):
        expected |= {f"tools/{name}/count": 1} | {f"tools/{name}/{share}_s": seconds for share in ("p50", "p95", "max")}
    assert metrics == pytest.approx(expected, rel=0.03)


@given(st.lists(st.floats(1e-4, 1e3), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_duration_quantiles_are_exact_to_two_percent(waits: list[float], share: float) -> None:
    metrics = Durations()
    for seconds in waits:
        metrics.add(seconds)
    exact = sorted(waits)[max(0, -int(-share * len(waits) // 1) - 1)]
    assert metrics.quantile_s(share) == pytest.approx(exact, rel=0.021)
    assert metrics.longest_s == max(waits)


def draw_panel(width: int, *, counters: RolloutCounters | None = None, done: bool = False) -> list[str]:
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=24)
    console.print(rollout_panel((counters or make_counters()[0]).snapshot(), 3.5, width, over=done))
    return screen.getvalue().splitlines()


def test_panel_fits_eighty_columns() -> None:
    lines = draw_panel(80)
    assert [re.sub(r"[━╸╺]+ *", "━ ", line.strip("│ ")) for line in lines[1:-1]] == [
        "rollouts ━ 1 of 4",
        "now      1 pending · 0 generating · 1 calling · 0 interacting",
        "tokens   4 per s · 35 in 3 turns · cached 91% of possible",
        "slowest  search · p50 2.0 s · p95 2.0 s · max 2.0 s · 1 call",
        "answers  1 ok · 1 timeout · 1 invalid",
        "ended    1 retried · 1 tool_failed · 1 feedback_done",
    ]
    assert "0:10, 0:15 left" in lines[0]
    assert "left" not in draw_panel(80, done=True)[0]


def test_tool_name_is_escaped() -> None:
    counters = RolloutCounters()
    counters.on_step("k", make_step("\x1b[31mred[bold]\n" + "x" * 100), 0.1)
    for shown in ("\n".join(draw_panel(80, counters=counters)), format_status(counters.snapshot(), 0.0)):
        assert "\x1b" not in shown
        assert "\\x1b[31mred[bold]\\n" in shown
        assert "max" in shown


class Screen(io.StringIO):
    """A stream with an event for writes."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.wrote.set()
        return count


def make_live_progress() -> tuple[RolloutProgress, Screen]:
    screen = Screen()
    return RolloutProgress(
        4, console=Console(file=screen, width=80, height=24, force_terminal=True, _environ={})
    ), screen


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_terminal_is_restored_after_errors(error: type[BaseException]) -> None:
    progress, screen = make_live_progress()
    before = threading.active_count()
    with pytest.raises(error), progress:
        assert screen.wrote.wait(10)
        raise error
    text = screen.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # The cursor is shown again.
    assert text.endswith("\n") or text.rindex("\x1b[?25h") > text.rindex("╯")
    assert threading.active_count() == before


def test_closed_terminal_does_not_end_the_run() -> None:
    screen = Screen()
    with RolloutProgress(1, console=Console(file=screen)) as progress:
        screen.close()
        progress.on_state("0/t/0", "generating")
    assert progress.snapshot().states == {"generating": 1}


def test_status_is_written_while_a_run_trains_and_removed_at_its_end(tmp_path: Path) -> None:
    statuses, read = iter([RunStatus(step=1), RunStatus(step=2, phase="learning")]), Event()

    def next_status() -> RunStatus:
        status = next(statuses, None)
        if status is None:
            read.set()
            raise RuntimeError("there are no more")  # As a full disk: it does not end the run.
        return status

    with StatusFile(tmp_path, next_status, every_s=0.001):
        assert read.wait(60)
        found = read_status(tmp_path)
        assert found is not None and found[0] == RunStatus(step=2, phase="learning") and found[1] < 60
    assert list(tmp_path.iterdir()) == [] and read_status(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_damaged_status_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS_FILE).write_text(content, encoding="latin-1")
    assert read_status(tmp_path) is None


def test_field_of_another_type_has_its_default_and_texts_are_cut(tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(f'{{"step": "3", "phase": "{"x" * 300}", "phase_s": NaN, "total": 4}}')
    found = read_status(tmp_path)
    assert found is not None and found[0] == RunStatus(phase="x" * 200, total=4)


def test_status_and_log_lines_move_while_a_turn_is_being_written() -> None:
    progress = RolloutProgress(4, phase="collecting rollouts", console=Console(file=io.StringIO(), width=40))
    progress.read_sampled = lambda: 30
    progress.on_state("0/t/0", "generating")
    status = progress.status()
    assert (status.phase, status.generating, status.total, status.written) == ("collecting rollouts", 1, 4, 30)
    assert status.written_per_s > 0 and status.steps == 0
    assert "30 in 0 turns" in progress.format_line(over=False)
    progress.on_generation("0/t/0", Generation((1,) * 40, (0.0,) * 40, "stop"), 10)
    assert progress.status().written == 40 and progress.metrics()["tokens/written"] == 40


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


def test_panel_of_a_training_fits_eighty_columns() -> None:
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

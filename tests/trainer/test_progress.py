"""Tests the counters of rollouts, their panel and log line, and the live display."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.types import Outcome
from trainer.engine.base import Generation
from trainer.ledger import Author, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.steppers import Step
from trainer.view.counters import Durations, RolloutCounters
from trainer.view.panel import format_status, rollout_panel
from trainer.view.progress import RolloutProgress


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
    assert metrics == pytest.approx(
        {
            "rollouts/pending": 1,
            "rollouts/generating": 0,
            "rollouts/calling": 1,
            "rollouts/interacting": 0,
            "rollouts/ended": 1,
            "rollouts/refilled": 1,
            "turns/count": 3,
            "tokens/written": 35,
            "tokens/asked": 330,
            "tokens/cached": 199,
            "tokens/possible": 99 + 119,
            "tokens/written_per_s": 3.5,
            "tokens/cached_of_possible": 199 / 218,
            "tokens/cached_of_possible_worst_group": 199 / 218,
            "tokens/cached_of_possible_turn_1": 99 / 99,
            "tokens/cached_of_possible_turn_2": 100 / 119,
            "time/elapsed_s": 10,
            "time/left_s": 15.0,
            "stops/tool_failed": 1,
            "stops/feedback_done": 1,
            "outcomes/timeout": 1,
            "outcomes/invalid": 1,
            "outcomes/ok": 1,
            "drift/whitespace": 2,
            "tools/search/count": 1,
            "tools/search/p50_s": 2.0,
            "tools/search/p95_s": 2.0,
            "tools/search/max_s": 2.0,
            "tools/feedback gsm8k/count": 1,
            "tools/feedback gsm8k/p50_s": 0.5,
            "tools/feedback gsm8k/p95_s": 0.5,
            "tools/feedback gsm8k/max_s": 0.5,
            "tools/search/timeout": 1,
            "tools/feedback gsm8k/ok": 1,
        },
        rel=0.03,
    )


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

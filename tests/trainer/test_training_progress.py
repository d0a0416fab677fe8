"""Whoever watches a training sees how far it is, whether it learns and where its time goes."""

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
from trainer.engine.base import Written
from trainer.ledger import Author, Ledger
from trainer.play import Watch
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import Step
from trainer.view.chart import BLOCKS, Trend
from trainer.view.training import TrainingProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(TrainingProgress):
    """On a screen that is kept, by a clock that stands still."""

    def __init__(self, steps: int = 10, *, terminal: bool = False, width: int = 80, **how: object) -> None:
        self.screen, self.clock = io.StringIO(), Clock()
        console = Console(file=self.screen, width=width, height=24, force_terminal=terminal, _environ={})
        super().__init__(steps, console=console, now=self.clock, **how)  # type: ignore[arg-type]

    def drawn(self, *, over: bool = False) -> list[str]:
        screen = io.StringIO()
        console = Console(file=screen, width=self.console.width, height=24)
        console.print(self.picture(over=over))
        return screen.getvalue().splitlines()

    def spend(self, phase: str, seconds: float) -> None:
        with self.phase(phase):
            self.clock.now += seconds

    def roll(self, count: int, apart: Watch | None = None) -> None:
        watch = apart or self
        for index in range(count):
            key = f"1-0-0/t/{index}"
            watch.state(key, "generating")
            watch.wrote(key, Written((1,) * 10, (0.0,) * 10, "stop", cached=50), 100)
            told = {"name": "search", "outcome": "ok", "elapsed_s": 0.5}
            watch.answered(key, Step(Author.TOOL, outcomes=(Outcome.OK,), info={"tools": [told]}), 0.5)
            watch.ended(key, Rollout("t", Ledger(), StopReason.DONE))

    def play(self, step: int, **metrics: float) -> dict[str, float]:
        """One step of 4 seconds; metrics by `area__name`."""
        self.begin(step, 8)
        with self.phase("rolling_out"):
            self.roll(8)
            self.clock.now += 3
        self.spend("learning", 1)
        told = {name.replace("__", "/"): value for name, value in metrics.items()} | self.measured()
        self.stepped(step, told)
        return told


def test_a_panel_says_it_all_in_eighty_columns() -> None:
    watched = Watched()
    watched.stepped(0, {"eval/greedy": 0.3})
    for step in range(1, 5):
        watched.play(
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
    watched.begin(5, 8)
    with watched.phase("rolling_out"):
        watched.roll(2)
        watched.clock.now += 1.5
        lines = watched.drawn()
    assert [re.sub(r"[━╸╺]+ *", "━ ", line.strip("│ ")) for line in lines[1:-1]] == [
        "step     ━ 4 of 10",
        "phase    rolling out · 1.5 s",
        "reward   0.400 ▁▃▆█ · outcome 0.5 · tools 0.05",
        "success  sampled 80% ▁▃▆█ · greedy 80% after step 4",
        "policy   entropy 0.41 · KL 1e-05 · mismatch 1.8e-07 · grad norm 0.83",
        "time     4.0 s a step · rolling out 75% · learning 25%",
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
def test_a_panel_keeps_its_shape(width: int) -> None:
    fresh, told, over = Watched(width=width), Watched(width=width), Watched(width=width)
    for one in (told, over):
        one.play(1, reward__mean=1e-5, reward__long_name=123456.0, success__sampled=1.0, entropy=nan, kl__old=1e9)
    shown = fresh.drawn(), told.drawn(), over.drawn(over=True)
    assert {len(lines) for lines in shown} == {15}
    assert {len(line) for lines in shown for line in lines} == {min(width - 2, 100)}
    assert "over after" in "".join(shown[2])


def test_a_panel_shows_only_colours_that_every_palette_has() -> None:
    watched = Watched(terminal=True)
    watched.play(1, reward__mean=0.5)
    watched.console.print(watched.picture(over=False))
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", watched.screen.getvalue()) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "31", "32", "39", "90"}


def test_time_is_told_by_phase_once() -> None:
    watched = Watched()
    told = watched.play(1)
    assert told["time/rolling_out_s"] == 3 and told["time/learning_s"] == 1
    watched.spend("saving", 2)
    assert watched.measured()["time/saving_s"] == 2
    assert not any(name.startswith("time/saving") for name in watched.measured())


def test_time_belongs_to_the_innermost_phase() -> None:
    watched = Watched()
    with watched.phase("evaluating"):
        watched.clock.now += 1
        watched.spend("scoring", 2)
        watched.clock.now += 4
        assert watched.measured() == {"time/evaluating_s": 5, "time/scoring_s": 2}
        watched.clock.now += 8
    assert watched.measured() == {"time/evaluating_s": 8}


def test_time_is_told_where_a_phase_fails() -> None:
    watched = Watched()
    with pytest.raises(ValueError), watched.phase("learning"):
        watched.clock.now += 3
        raise ValueError
    assert watched.measured() == {"time/learning_s": 3}
    assert "between two" in "".join(watched.drawn())


def test_what_the_machine_did_is_told_in_areas_of_its_own() -> None:
    watched = Watched()
    told = watched.play(1)
    assert {name.partition("/")[0] for name in told} == {"time", "engine"}
    assert told["engine/tokens/written"] == 80
    assert told["engine/tokens/written_per_s"] == pytest.approx(80 / 3)
    assert told["engine/tokens/cached_of_possible"] <= 1
    assert told["engine/stops/done"] == told["engine/tools/search/count"] == 8
    assert told["time/tools/search/p95_s"] == pytest.approx(0.5, rel=0.03)
    assert not any("left" in name or "elapsed" in name or "generating" in name for name in told)


def test_rollouts_are_counted_by_step_and_those_of_an_evaluation_apart() -> None:
    watched = Watched()
    watched.begin(1, 8)
    watched.roll(8)
    with watched.phase("evaluating", rollouts=50) as apart:
        watched.roll(3, apart)
        assert any("3 of 50" in line for line in watched.drawn())
        assert any("rollouts, evaluating" in line for line in watched.drawn())
    assert any("8 of 8" in line for line in watched.drawn())
    assert watched.measured()["engine/rollouts/ended"] == 8
    watched.begin(2, 8)
    assert any("0 of 8" in line for line in watched.drawn())
    watched.more(4)
    assert any("0 of 12" in line for line in watched.drawn())


def test_rollouts_that_go_on_from_one_step_to_the_next_stay_in_view_whatever_is_evaluated_meanwhile() -> None:
    watched = Watched()
    watched.begin(1, 0)
    watched.state("0-0-0/t/0", "generating")
    with watched.phase("evaluating", rollouts=2) as apart:
        watched.roll(2, apart)
        watched.state("0-0-0/t/0", "calling")
        assert any("0 calling" in line for line in watched.drawn())
    watched.begin(2, 0)
    assert any("1 calling" in line for line in watched.drawn())
    watched.ended("0-0-0/t/0", Rollout("t", Ledger(), StopReason.DONE))
    assert any("0 calling" in line for line in watched.drawn())
    assert any(line.startswith("│ rollouts 1 ") for line in watched.drawn())


def test_time_left_is_that_of_late_steps() -> None:
    watched = Watched(10)
    assert watched.left_s is None
    watched.spend("warming", 1000)
    watched.stepped(0, {"eval/greedy": 0.1})
    for step in range(1, 5):
        watched.play(step)
        assert watched.left_s == 4 * (10 - step)
    watched.clock.now += 3
    assert watched.left_s == 4 * 6 - 3
    for step in range(5, 11):
        watched.play(step)
    assert watched.left_s is None


def test_a_run_that_goes_on_shows_where_it_came_from() -> None:
    history = [{"step": step, "reward/mean": step / 10, "time/learning_s": 2.0} for step in range(6)]
    watched = Watched(10, history=history)
    shown = "\n".join(watched.drawn())
    assert "5 of 10" in shown and "▁▂▄▅▇█" in shown and "2.0 s a step" in shown
    assert watched.screen.getvalue() == ""


def test_without_a_terminal_a_step_is_a_line() -> None:
    with Watched() as watched:
        watched.stepped(0, {"eval/greedy": 0.3, "time/evaluating_s": 2.0})
        watched.play(1, reward__mean=0.25, reward__outcome=0.2, reward__tools=0.05, success__sampled=0.2, kl__old=1e-6)
        watched.play(2)
        watched.said("look out\n  remedy: do something")
    assert watched.screen.getvalue().splitlines() == [
        "step 0 of 10; greedy 30% before the first step; evaluating 2.0 s; 0:00",
        "step 1 of 10; reward 0.250 (outcome 0.2, tools 0.05); sampled 20%, greedy 30% before the first step; KL 1e-06;"
        " rolling out 3.0 s, learning 1.0 s; 0:04, 0:36 left",
        "step 2 of 10; greedy 30% before the first step; rolling out 3.0 s, learning 1.0 s; 0:08, 0:32 left",
        "look out",
        "  remedy: do something",
    ]


def test_a_long_step_says_now_and_then_that_it_goes_on() -> None:
    watched = Watched()
    watched.begin(1, 8)
    with watched.phase("rolling_out"):
        watched.roll(2)
        watched.clock.now += 59
        assert watched.line(over=False) == ""
        watched.clock.now += 1
        assert watched.line(over=False).startswith("step 1 of 10; rolling out for 1:00; 2 of 8 rollouts; ")
        assert watched.line(over=False) == ""
        watched.clock.now += 61
        assert watched.line(over=True) == ""


def test_what_is_said_stays_above_the_panel() -> None:
    with Watched(terminal=True) as watched:
        watched.said("look \x1b[31mout[/bold]")
        watched.play(1, reward__mean=0.5)
    text = watched.screen.getvalue()
    assert text.index("look \\x1b[31mout[/bold]") < text.rindex("╭")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_components_name_paints_nothing() -> None:
    watched = Watched()
    watched.play(1, reward__mean=0.5, **{"reward__\x1b[31mred": 0.5, "reward__other": 0.5})
    assert "\x1b" not in "".join(watched.drawn()) + watched.screen.getvalue()


def test_a_terminal_that_has_gone_does_not_end_the_run() -> None:
    with Watched() as watched:
        watched.screen.close()
        watched.said("nobody hears it")
        told = watched.play(1)
    assert told["time/learning_s"] == 1


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 20))
def test_a_trend_has_room_for_any_many_steps(values: list[float], width: int) -> None:
    trend = Trend(width)
    for value in [*values, nan]:
        trend.add(value)
    shown = str(trend)
    assert len(shown) <= width and set(shown) <= set(BLOCKS)
    assert bool(shown) == bool(values)
    assert len(trend._means) + len(trend._open) <= 2 * width + len(values) // width + 1


def test_a_trend_goes_where_its_numbers_go() -> None:
    rising, falling = Trend(8), Trend(8)
    for step in range(1000):
        rising.add(step)
        falling.add(-step)
    assert str(rising) == "".join(sorted(str(rising))) and str(rising)[0] == "▁" and str(rising)[-1] == "█"
    assert str(falling) == "".join(sorted(str(falling), reverse=True))


def test_staleness_is_shown_where_rollouts_run_ahead() -> None:
    watched = Watched(width=120)
    watched.play(1, rollout__staleness=0.0, entropy=0.4)
    assert not any("staleness" in line for line in watched.drawn())
    watched.play(2, rollout__staleness=1.25, staleness__max=2.0, staleness__dropped=3.0, entropy=0.4)
    assert any("staleness 1.25, at most 2 · 3 groups dropped" in line for line in watched.drawn())

"""What a person sees of a run that goes on is what was told; showing it costs little and leaves nothing behind."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.gateway import Gateway
from gateway.types import Outcome
from tests.trainer.conversations import template_for
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.scripted import ScriptedEngine
from trainer.groups import Groups
from trainer.ledger import Author, Ledger
from trainer.play import Player
from trainer.run.rollout import Rollout, StopReason
from trainer.steps import Step
from trainer.task import Task
from trainer.view.counts import Counts, Waits
from trainer.view.panel import panel, plain
from trainer.view.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written(count: int, cached: int = 0) -> Written:
    return Written((1,) * count, (0.0,) * count, "stop", cached=cached)


def answer(name: str, outcome: Outcome = Outcome.OK, seconds: float = 0.1) -> Step:
    told = {"name": name, "outcome": outcome.value, "elapsed_s": seconds}
    return Step(Author.TOOL, outcomes=(outcome,), info={"tools": [told]})


def over(stop: StopReason = StopReason.DONE) -> Rollout:
    return Rollout("t", Ledger(), stop)


def played() -> tuple[Counts, Clock]:
    """Two of four rollouts are over, one of them is made anew, one waits for a tool."""
    clock = Clock()
    counts = Counts(4, clock=clock)
    for key in ("0/t/0", "0/t/1", "0/t/2"):
        counts.state(key, "pending")
        counts.state(key, "generating")
    counts.wrote("0/t/0", written(10), 100)
    counts.state("0/t/0", "calling")
    counts.answered("0/t/0", answer("search", Outcome.TIMEOUT, 2.0), 2.0)
    counts.answered("0/t/0", answer("no_such_tool", Outcome.INVALID, 9.0), 9.0)
    counts.ended("0/t/0", over(StopReason.TOOL_FAILED))
    counts.state("0/t/0.1", "pending")
    counts.wrote("0/t/1", written(20, cached=99), 100)
    counts.answered("0/t/1", Step(outcomes=(Outcome.OK,), source="gsm8k"), 0.5)
    counts.wrote("0/t/1", written(5, cached=100), 130)
    counts.ended("0/t/1", replace(over(StopReason.FEEDBACK_DONE), infos={"drift": {"whitespace": 2}}))
    counts.state("0/t/2", "calling")
    clock.now += 10
    return counts, clock


def test_counts_are_metrics() -> None:
    told = played()[0].snapshot()
    assert told == pytest.approx(
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


def test_what_nobody_knows_yet_is_left_out() -> None:
    told = Counts(4, clock=Clock()).snapshot()
    assert not {"time/left_s", "tokens/cached_of_possible", "tokens/written_per_s"} & told.keys()
    assert Counts().seen().left_s is None


def test_names_that_the_policy_invents_become_no_metric() -> None:
    counts = Counts()
    for number in range(100):
        counts.answered("0/t/0", answer(f"invented_{number}", Outcome.INVALID), 0.1)
    assert counts.seen().waits == {}
    assert counts.seen().outcomes == {Outcome.INVALID: 100}


def test_the_slowest_tool_is_the_one_that_is_often_slow() -> None:
    counts = Counts()
    for _ in range(30):
        counts.answered("k", answer("steady", seconds=0.5), 0.5)
        counts.answered("k", answer("quick", seconds=0.01), 0.01)
    counts.answered("k", answer("quick", seconds=9.0), 9.0)
    slowest = counts.seen().slowest
    assert slowest is not None
    assert slowest[0] == "steady"


def test_time_left_comes_to_the_truth() -> None:
    """Of 40 rollouts, eight at a time and each of one to five turns of a second."""
    clock = Clock()
    counts = Counts(40, clock=clock)
    lengths = [1 + number % 5 for number in range(40)]
    running: dict[int, int] = {}
    errors = {}
    waiting = list(range(40))
    while waiting or running:
        while waiting and len(running) < 8:
            number = waiting.pop(0)
            running[number] = lengths[number]
            counts.state(f"{number}/t/0", "generating")
        clock.now += 1
        for number in list(running):
            counts.wrote(f"{number}/t/0", written(1), 10)
            running[number] -= 1
            if not running[number]:
                del running[number]
                counts.ended(f"{number}/t/0", over())
        errors[clock.now - 100] = counts.seen().left_s
    total = clock.now - 100
    assert errors[total] == 0.0
    assert all(left is not None and abs(left - (total - at)) <= 0.4 * total for at, left in errors.items())


@given(st.lists(st.floats(1e-4, 1e3), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_waits_are_known_to_within_a_few_hundredths(waits: list[float], share: float) -> None:
    told = Waits()
    for seconds in waits:
        told.add(seconds)
    exact = sorted(waits)[max(0, -int(-share * len(waits) // 1) - 1)]
    assert told.within_s(share) == pytest.approx(exact, rel=0.021)
    assert told.longest_s == max(waits)


def test_an_event_costs_less_than_twenty_microseconds() -> None:
    counts, step, turn, taken = Counts(1000), answer("search"), written(50), []
    for _ in range(5):
        began = time.thread_time()  # Whoever else has the machine is no part of it.
        for key in map(str, range(800)):
            counts.state(key, "generating")
            counts.wrote(key, turn, 100)
            counts.answered(key, step, 0.1)
            counts.ended(key, over())
        taken.append((time.thread_time() - began) / (4 * 800))
    assert min(taken) < 20e-6


def test_memory_does_not_grow_with_the_run() -> None:
    counts = Counts()
    for number in range(10_000):
        counts.wrote(f"{number}/t/0", written(1), 100)
        counts.ended(f"{number}/t/0", over())
    held = (counts._now, counts._known, counts._openings, counts._turns)
    assert max(map(len, held)) <= 4096


def drawn(width: int, *, counts: Counts | None = None, done: bool = False) -> list[str]:
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=24)
    console.print(panel((counts or played()[0]).seen(), 3.5, width, over=done))
    return screen.getvalue().splitlines()


def test_a_panel_says_it_all_in_eighty_columns() -> None:
    lines = drawn(80)
    assert [re.sub(r"[━╸╺]+ *", "━ ", line.strip("│ ")) for line in lines[1:-1]] == [
        "rollouts ━ 1 of 4",
        "now      1 pending · 0 generating · 1 calling · 0 interacting",
        "tokens   4 per s · 35 in 3 turns · cached 91% of possible",
        "slowest  search · p50 2.0 s · p95 2.0 s · max 2.0 s · 1 call",
        "answers  1 ok · 1 timeout · 1 invalid",
        "ended    1 made anew · 1 tool_failed · 1 feedback_done",
    ]
    assert "0:10, 0:15 left" in lines[0]
    assert "left" not in drawn(80, done=True)[0]


@pytest.mark.parametrize("width", [30, 80, 120, 300])
@pytest.mark.parametrize("counts", [Counts(), played()[0]])
def test_a_panel_keeps_its_shape(width: int, counts: Counts) -> None:
    lines = drawn(width, counts=counts)
    assert len(lines) == 8
    assert {len(line) for line in lines} == {min(width - 2, 100)}


def test_a_panel_shows_only_colours_that_every_palette_has() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system="truecolor")
    console.print(panel(played()[0].seen(), 3.5, 80))
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", screen.getvalue()) for code in found.split(";")}
    assert codes <= {"0", "1", "2", "31", "32", "39", "90"}


def test_a_tools_name_paints_nothing() -> None:
    counts = Counts()
    counts.answered("k", answer("\x1b[31mred[bold]\n" + "x" * 100), 0.1)
    for shown in ("\n".join(drawn(80, counts=counts)), plain(counts.seen(), 0.0)):
        assert "\x1b" not in shown
        assert "\\x1b[31mred[bold]\\n" in shown
        assert "max" in shown


def test_a_line_says_the_same() -> None:
    assert plain(played()[0].seen(), 3.5) == (
        "1 of 4 rollouts; 1 pending, 1 calling; 4 per s, 35 in 3 turns, cached 91% of possible; slowest search,"
        " p50 2.0 s, p95 2.0 s, max 2.0 s, 1 call; 1 ok, 1 timeout, 1 invalid;"
        " 1 made anew, 1 tool_failed, 1 feedback_done; 0:10, 0:15 left"
    )
    assert plain(Counts(clock=Clock()).seen(), 0.0) == "0 rollouts; 0 per s, 0 in 0 turns, cached - of possible; 0:00"


class Screen(io.StringIO):
    """Tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.wrote.set()
        return count


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end() -> None:
    screen = Screen()
    with Progress(4, console=Console(file=screen, width=40), every_s=0.01) as progress:
        progress.state("0/t/0", "generating")
        assert screen.wrote.wait(10)
    lines = screen.getvalue().splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("0 of 4 rollouts; ") for line in lines)
    assert not re.search(r"left|\x1b", lines[-1])


def live() -> tuple[Progress, Screen]:
    screen = Screen()
    return Progress(4, console=Console(file=screen, width=80, height=24, force_terminal=True, _environ={})), screen


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_terminal_is_left_as_it_was_whatever_happens(error: type[BaseException]) -> None:
    progress, screen = live()
    before = threading.active_count()
    with pytest.raises(error), progress:
        assert screen.wrote.wait(10)
        raise error
    text = screen.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # The cursor is shown again.
    assert text.endswith("\n") or text.rindex("\x1b[?25h") > text.rindex("╯")
    assert threading.active_count() == before


def test_a_terminal_is_not_painted_more_often_than_eight_times_a_second() -> None:
    progress, screen = live()
    with progress:
        began = time.monotonic()
        while screen.getvalue().count("╯") < 3 and time.monotonic() < began + 20:
            progress.state("0/t/0", "generating")
            screen.wrote.wait(1)
            screen.wrote.clear()
        spent = time.monotonic() - began
    assert 3 / spent <= 8 / 0.9


def test_a_dumb_terminal_gets_lines() -> None:
    screen = Screen()
    console = Console(file=screen, width=80, force_terminal=True, _environ={"TERM": "dumb"})
    with Progress(1, console=console):
        pass
    assert screen.getvalue().startswith("0 of 1 rollouts; ")


def test_a_terminal_that_has_gone_does_not_end_the_run() -> None:
    screen = Screen()
    with Progress(1, console=Console(file=screen)) as progress:
        screen.close()
        progress.state("0/t/0", "generating")
    assert progress.seen().states == {"generating": 1}


async def test_a_run_is_counted_as_it_went() -> None:
    counts, failures = Counts(6), [EngineError("out of memory")]

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Written | EngineError:
        yes = (*template.tokens.encode("yes"), *template.stop_ids[:1])
        return failures.pop() if failures else Written(yes, (0.0,) * len(yes), "stop", cached=len(ids) - 1)

    template = template_for(FAMILIES["hermes"])
    tasks = [Task(name, ({"role": "user", "content": "really?"},)) for name in ("a.1/b", "c")]
    with anyio.fail_after(30):
        async with Gateway(()) as gateway:
            player = Player(ScriptedEngine(script), template, gateway, watch=counts)
            async with Groups(player, 3).play(tasks) as groups:
                done = [group async for group in groups]
    told = counts.snapshot()
    assert len(done) == 2
    assert told["rollouts/ended"] == 6
    assert told["rollouts/refilled"] == 1
    assert (told["stops/done"], told["stops/engine_failed"]) == (6, 1)
    assert told["tokens/cached"] == told["tokens/possible"] == told["tokens/asked"] - 6
    assert told["time/left_s"] == 0
    assert sum(value for name, value in told.items() if name.startswith("rollouts/")) == 7

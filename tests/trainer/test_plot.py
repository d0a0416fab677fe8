"""How a run went can be looked at: in a terminal of any width, and on paper."""

from __future__ import annotations

import io
import re
import struct
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from gateway.errors import ConfigError
from trainer.run.file import RunError
from trainer.run.history import dump
from trainer.view.chart import BRAILLE, Curve, drawn
from trainer.view.curves import charts, smooth, spent
from trainer.view.plot import plot

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


def run(folder: Path, steps: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    before = dump(0, {"eval/greedy": 0.3, "eval/sampled": 0.2})
    lines = [dump(step, STEP | ({"eval/greedy": 0.9} if step == steps else {})) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_bytes(before + b"".join(lines) + b'{"step": 99, "rew')
    return folder


def shown(run: Path, width: int = 120, out: Path | None = None) -> str:
    screen = io.StringIO()
    plot(run, out, Console(file=screen, width=width, height=40))
    return screen.getvalue()


def size(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize("width", [40, 92, 120, 300])
def test_a_terminal_of_any_width_shows_every_chart(tmp_path: Path, width: int) -> None:
    text = shown(run(tmp_path), width)
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
    assert max(len(line) for line in text.splitlines()[:-1]) <= width


def test_the_picture_lies_in_the_runs_folder_or_where_it_is_asked_for(tmp_path: Path) -> None:
    assert shown(run(tmp_path), out=tmp_path / "mine.png").replace("\n", "").endswith("mine.png")
    shown(tmp_path)
    assert size(tmp_path / "curves.png") == size(tmp_path / "mine.png") == (1560, 1695)


def test_a_picture_has_room_for_what_was_measured_only(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(dump(step, {"entropy": 0.5}) for step in range(1, 100)))
    text = shown(tmp_path)
    assert "Entropy" in text and "Reward" not in text and "Time" not in text
    assert size(tmp_path / "curves.png")[1] < 600


def test_one_step_is_enough(tmp_path: Path) -> None:
    assert "reward 0.5" in shown(run(tmp_path, 1))
    assert size(tmp_path / "curves.png")


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "rew')
    with pytest.raises(RunError, match="nothing is measured yet"):
        shown(tmp_path)
    with pytest.raises(RunError, match="name the folder of a training run"):
        shown(tmp_path / "elsewhere")


def test_a_picture_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/p\.png: cannot be written \(No such file"):
        shown(run(tmp_path), out=tmp_path / "none" / "p.png")


def test_without_matplotlib_the_terminal_still_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainer.view.figure", raising=False)
    monkeypatch.delattr("trainer.view.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "reward 0.5" in (text := shown(run(tmp_path)))
    assert "pip install -e '.[plot]'" in text and not (tmp_path / "curves.png").exists()
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[plot\]'"):
        shown(tmp_path, out=tmp_path / "mine.png")


def test_numbers_that_are_none_are_gaps() -> None:
    history = [{"step": step, "entropy": nan if step == 2 else 0.5, "kl/old": step - 2.0} for step in range(1, 5)]
    entropy, kl = charts(history)
    assert [step for step, _ in entropy.curves[0].points] == [1, 3, 4]
    assert [step for step, _ in kl.curves[0].points] == [3, 4]  # A logarithm knows no other.


def test_one_component_is_the_reward_itself() -> None:
    (chart,) = charts([{"step": 1, "reward/mean": 0.5, "reward/outcome": 0.5, "reward/failed": 0.0}])
    assert [curve.name for curve in chart.curves] == ["reward"]


def test_phases_are_stacked_by_what_they_take() -> None:
    history = [{"step": 0, "time/evaluating_s": 99.0}] + [
        {"step": step, "time/rolling_out_s": 2.0, "time/learning_s": 3.0}
        | ({"time/saving_s": 1.0} if step == 2 else {})
        for step in (1, 2)
    ]
    assert spent(history) == {
        "learning": [(1, 3.0), (2, 3.0)],
        "rolling out": [(1, 2.0), (2, 2.0)],
        "saving": [(1, 0.0), (2, 1.0)],
    }


def curve(values: Sequence[float], name: str = "one") -> Curve:
    return Curve(name, tuple(enumerate(values)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_smoothing_stays_within_what_was_measured(values: list[float]) -> None:
    means = [value for _, value in smooth(curve(values)).points]
    assert len(means) == len(values)
    assert min(values) - 1e-6 <= min(means) and max(means) <= max(values) + 1e-6


def test_smoothing_does_not_lag() -> None:
    middle = smooth(curve([0.0] * 50 + [1.0] * 50)).points[48:52]
    assert [value > 0.5 for _, value in middle] == [False, False, True, True]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30), min_size=1, max_size=9),
    st.integers(30, 200),
    st.sampled_from(["linear", "log"]),
)
def test_a_chart_keeps_to_its_size(curves: list[list[float]], width: int, scale: str) -> None:
    text = drawn(Text("t"), [curve(values, f"c{place}") for place, values in enumerate(curves)], width, 8, scale=scale)
    lines = text.plain.splitlines()
    assert len(lines) == 1 + 8 + 2
    assert max(map(len, lines[1:])) <= width
    assert any(ord(char) > BRAILLE for line in lines for char in line)


def test_a_chart_goes_where_its_numbers_go() -> None:
    lines = drawn(Text("t"), [curve(range(100))], 60, 4).plain.splitlines()[1:5]
    places = [re.search(r"[\u2801-\u28ff]", line).start() for line in lines]  # type: ignore[union-attr]
    assert places == sorted(places, reverse=True)
    assert lines[0].endswith(" one 99") and lines[0].startswith("99│") and lines[3].startswith(" 0│")


def test_curves_that_end_together_are_named_one_below_the_other() -> None:
    lines = drawn(Text("t"), [curve([1, 2], "this"), curve([1, 2], "that")], 40, 4).plain.splitlines()[1:5]
    assert lines[0].endswith("this 2") and lines[1].endswith("that 2")

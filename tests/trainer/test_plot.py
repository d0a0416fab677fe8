"""Tests `plot`: charts in terminals of any width and as files, and smoothing."""

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
from trainer.storage.rollout_file import RunError
from trainer.storage.run_files import dump_metrics
from trainer.view.learning_summary import LINE_LABELS
from trainer.view.plot import CHARTS, build_charts, phase_seconds, plot_run, smooth
from trainer.view.terminal_chart import BRAILLE, Curve, draw_chart

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


def plot_text(run: Path, width: int = 120, out: Path | None = None) -> str:
    screen = io.StringIO()
    plot_run(run, out, Console(file=screen, width=width, height=40))
    return screen.getvalue()


def png_size(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


@pytest.mark.parametrize("width", [40, 92, 120, 300])
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
    assert max(len(line) for line in text.splitlines()[:-1]) <= width


def test_image_is_saved_in_run_or_at_given_path(tmp_path: Path) -> None:
    assert plot_text(write_metrics(tmp_path), out=tmp_path / "mine.png").replace("\n", "").endswith("mine.png")
    plot_text(tmp_path)
    assert png_size(tmp_path / "curves.png") == png_size(tmp_path / "mine.png") == (1560, 1695)


def test_image_has_only_charts_with_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(dump_metrics(step, {"entropy": 0.5}) for step in range(1, 100)))
    text = plot_text(tmp_path)
    assert "Entropy" in text and "Reward" not in text and "Time" not in text
    assert png_size(tmp_path / "curves.png")[1] < 600


def test_single_step_is_plotted(tmp_path: Path) -> None:
    assert "reward 0.5" in plot_text(write_metrics(tmp_path, 1))
    assert png_size(tmp_path / "curves.png")


def test_run_without_steps_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "rew')
    with pytest.raises(RunError, match="has no metrics yet"):
        plot_text(tmp_path)
    with pytest.raises(RunError, match="name the folder of a training run"):
        plot_text(tmp_path / "elsewhere")


def test_unwritable_image_is_reported_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/p\.png: cannot be written \(No such file"):
        plot_text(write_metrics(tmp_path), out=tmp_path / "none" / "p.png")


def test_terminal_charts_work_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trainer.view.figure", raising=False)
    monkeypatch.delattr("trainer.view.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "reward 0.5" in (text := plot_text(write_metrics(tmp_path)))
    assert "pip install 'mtrl-rl[plot]'" in text and not (tmp_path / "curves.png").exists()
    with pytest.raises(ConfigError, match=r"pip install 'mtrl-rl\[plot\]'"):
        plot_text(tmp_path, out=tmp_path / "mine.png")


def test_non_finite_values_are_gaps() -> None:
    history = [{"step": step, "entropy": nan if step == 2 else 0.5, "kl/old": step - 2.0} for step in range(1, 5)]
    entropy, kl = build_charts(history)
    assert [step for step, _ in entropy.curves[0].points] == [1, 3, 4]
    assert [step for step, _ in kl.curves[0].points] == [3, 4]  # Logarithmic scale.


def test_single_reward_component_has_no_own_curve() -> None:
    (chart,) = build_charts([{"step": 1, "reward/mean": 0.5, "reward/outcome": 0.5, "reward/failed": 0.0}])
    assert [curve.name for curve in chart.curves] == ["reward"]


def test_phases_are_sorted_by_duration() -> None:
    history = [{"step": 0, "time/evaluating_s": 99.0}] + [
        {"step": step, "time/rolling_out_s": 2.0, "time/learning_s": 3.0}
        | ({"time/saving_s": 1.0} if step == 2 else {})
        for step in (1, 2)
    ]
    assert phase_seconds(history) == {
        "learning": [(1, 3.0), (2, 3.0)],
        "rolling out": [(1, 2.0), (2, 2.0)],
        "saving": [(1, 0.0), (2, 1.0)],
    }


def make_curve(values: Sequence[float], name: str = "one") -> Curve:
    return Curve(name, tuple(enumerate(values)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_smoothing_stays_within_the_range_of_values(values: list[float]) -> None:
    means = [value for _, value in smooth(make_curve(values)).points]
    assert len(means) == len(values)
    assert min(values) - 1e-6 <= min(means) and max(means) <= max(values) + 1e-6


def test_smoothing_does_not_lag() -> None:
    middle = smooth(make_curve([0.0] * 50 + [1.0] * 50)).points[48:52]
    assert [value > 0.5 for _, value in middle] == [False, False, True, True]


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30), min_size=1, max_size=9),
    st.integers(30, 200),
    st.sampled_from(["linear", "log"]),
)
def test_chart_has_its_size(curves: list[list[float]], width: int, scale: str) -> None:
    text = draw_chart(
        Text("t"), [make_curve(values, f"c{place}") for place, values in enumerate(curves)], width, 8, scale=scale
    )
    lines = text.plain.splitlines()
    assert len(lines) == 1 + 8 + 2
    assert max(map(len, lines[1:])) <= width
    assert any(ord(char) > BRAILLE for line in lines for char in line)


def test_chart_rises_with_its_values() -> None:
    lines = draw_chart(Text("t"), [make_curve(range(100))], 60, 4).plain.splitlines()[1:5]
    rows = [re.search(r"[\u2801-\u28ff]", line).start() for line in lines]  # type: ignore[union-attr]
    assert rows == sorted(rows, reverse=True)
    assert lines[0].endswith(" one 99") and lines[0].startswith("99│") and lines[3].startswith(" 0│")


def test_labels_of_equal_curves_do_not_overlap() -> None:
    lines = draw_chart(Text("t"), [make_curve([1, 2], "this"), make_curve([1, 2], "that")], 40, 4).plain.splitlines()[
        1:5
    ]
    assert lines[0].endswith("this 2") and lines[1].endswith("that 2")


def test_a_label_stands_for_one_metric_in_charts_and_step_lines() -> None:
    labels = [("step line", *item) for item in LINE_LABELS.items()]
    labels += [("chart", *item) for chart in CHARTS for item in chart[-1].items()]
    metrics: dict[str, set[str]] = {}
    for _, metric, label in labels:
        metrics.setdefault(label, set()).add(metric)
    assert {label: names for label, names in metrics.items() if len(names) > 1} == {}

"""Draws a run's curves in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import fsum, isfinite, nan
from pathlib import Path
from typing import Literal, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.storage.rollout_file import RunError
from trainer.storage.run_files import METRICS_FILE, read_metrics, read_run_info
from trainer.view.learning_summary import phase_times, reward_components
from trainer.view.panel import format_clock
from trainer.view.terminal_chart import QUIET, Curve, draw_chart
from trainer.view.text import format_duration, to_line


@dataclass(frozen=True, slots=True)
class SuccessCriterion:
    """When a rollout counts as a success: a reward component and its threshold, from the run's settings."""

    component: str = ""
    threshold: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> Self:
        reward = read_run_info(folder).get("settings", {}).get("reward")
        components = (reward or {}).get("components")
        if not components:
            return cls()
        return cls(reward.get("success") or next(iter(components)), reward.get("success_at", 1.0))

    def is_success(self, rewards: Mapping[str, float]) -> bool | None:
        return rewards[self.component] >= self.threshold if self.component in rewards else None


History = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that share axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    scale: Literal["linear", "share", "log"] = "linear"
    """`share` is from 0 to 1."""


CHARTS: Sequence[tuple[str, str, Literal["linear", "share", "log"], Mapping[str, str]]] = (
    (
        "Success",
        "share of rollouts",
        "share",
        {
            "success/sampled": "sampled",
            "eval/sampled": "held out, sampled",
            "eval/greedy": "held out, greedy",
        },
    ),
    ("Entropy", "nats a token", "linear", {"entropy": "entropy"}),
    (
        "KL and mismatch",
        "nats a token",
        "log",
        {
            "kl/reference": "KL to reference",
            "kl/old": "KL of a step",
            "mismatch/kl": "mismatch KL",
            "mismatch/max": "largest mismatch",
            "agreement/max": "servers and trainer",
        },
    ),
    ("Length", "tokens a rollout", "linear", {"rollout/tokens": "tokens"}),
    ("Turns and calls", "a rollout", "linear", {"rollout/turns": "turns", "rollout/calls": "calls"}),
    ("Gradient", "norm before clipping", "linear", {"update/grad_norm": "gradient norm"}),
)


def build_charts(history: History) -> list[Chart]:
    """The charts that have at least one curve."""
    return [chart for chart in (_reward_chart(history), *_metric_charts(history)) if chart.curves]


def phase_seconds(history: History) -> dict[str, list[tuple[float, float]]]:
    """The seconds by step of each phase, the longest phase first."""
    steps = [metrics for metrics in history if metrics["step"] > 0]
    names = {name for metrics in steps for name in phase_times(metrics)}
    by_phase = {name: [(metrics["step"], phase_times(metrics).get(name, 0.0)) for metrics in steps] for name in names}
    return dict(sorted(by_phase.items(), key=lambda item: (-sum(seconds for _, seconds in item[1]), item[0])))


def smooth(curve: Curve) -> Curve:
    """The curve with each point replaced by a centred mean over a tenth of all points, fewer at the ends."""
    reach = len(curve.points) // 20
    values = [value for _, value in curve.points]
    means = []
    for index, (step, _) in enumerate(curve.points):
        around = values[max(0, index - reach) : index + reach + 1]
        means.append((step, fsum(around) / len(around)))
    return Curve(curve.name, tuple(means), curve.sparse)


def _reward_chart(history: History) -> Chart:
    parts = dict.fromkeys(name for metrics in history for name in reward_components(metrics))
    named = {"reward/mean": "reward"} | ({f"reward/{part}": part for part in parts} if len(parts) > 1 else {})
    return Chart("Reward", "mean of a step", tuple(_build_curves(history, named)))


def _metric_charts(history: History) -> Iterator[Chart]:
    for title, unit, scale, names in CHARTS:
        yield Chart(title, unit, tuple(_build_curves(history, names, positive=scale == "log")), scale)


def _build_curves(history: History, names: Mapping[str, str], *, positive: bool = False) -> Iterator[Curve]:
    for name, label in names.items():
        points = tuple(
            (metrics["step"], value)
            for metrics in history
            if isfinite(value := metrics.get(name, nan)) and (value > 0 or not positive)
        )
        if points:
            yield Curve(label, points, sparse=name.startswith("eval/"))


WIDTH, HEIGHT = 60, 8
"""The maximal size of a chart in characters; a wide terminal shows two side by side."""
MIN_COLUMN_WIDTH = 46
"""If two columns would be narrower than this, there is one."""
MINUTE_S = 60.0
SMOOTH_FROM_STEPS = 60
"""With this many steps, the terminal shows smoothed curves."""


def plot_run(run: Path, console: Console) -> None:
    """Prints charts of the run. Raises RunError if there are no metrics."""
    measured = read_metrics(run / METRICS_FILE)
    shown = build_charts(measured)
    if not shown:
        raise RunError(f"{run / METRICS_FILE}: has no metrics yet\n  remedy: wait until the first step has ended")
    width = (
        min(WIDTH, console.width // 2 - 1) if console.width // 2 > MIN_COLUMN_WIDTH else min(WIDTH + 20, console.width)
    )
    texts = [_draw_chart(chart, width) for chart in shown] + [
        text for text in [_draw_phase_times(measured, width)] if text
    ]
    for row in _arrange_rows(texts, 2 if console.width // 2 > MIN_COLUMN_WIDTH else 1):
        console.print(row)


def _draw_chart(chart: Chart, width: int) -> Text:
    curves = [
        curve if curve.sparse or len(curve.points) < SMOOTH_FROM_STEPS else smooth(curve) for curve in chart.curves
    ]
    title = Text.assemble((chart.title, "bold"), (f", {chart.unit}", QUIET))
    return draw_chart(title, curves, width, HEIGHT, scale=chart.scale)


def _draw_phase_times(measured: History, width: int) -> Text | None:
    sums = {to_line(name): sum(seconds for _, seconds in points) for name, points in phase_seconds(measured).items()}
    total = sum(sums.values())
    if not total:
        return None
    format_seconds = format_clock if total >= MINUTE_S else format_duration
    text = Text.assemble(("Time", "bold"), (f", {format_seconds(total)} in all\n", QUIET))
    name_width = max(map(len, sums))
    for name, seconds in sums.items():
        text.append(f"{name:>{name_width}} ", QUIET)
        text.append("█" * round(seconds / total * (width - name_width - 16)), "green")
        text.append(f" {seconds / total:.0%} {format_seconds(seconds)}\n")
    return text


def _arrange_rows(texts: Sequence[Text], columns: int) -> Iterator[Table]:
    for row in zip_longest(*[iter(texts)] * columns, fillvalue=Text()):
        table = Table.grid(padding=(0, 2, 1, 0))
        table.add_row(*row)
        yield table

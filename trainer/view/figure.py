"""Draws the charts with matplotlib: pale raw values, strong smoothed ones, distinguished by colour and dashes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.view.plot import Chart, smooth
from trainer.view.terminal_chart import Curve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
"""The palette of Okabe and Ito, which is safe for colour-blind people."""
DASHES = ("-", "--", "-.", ":")
MARKS = "osD^"
CHART_INCHES = 5.2, 2.7
"""The width and height of a chart."""
HEADROOM = 1.35
"""Space for the legend above the stacked times."""
SMOOTH_FROM_POINTS = 30
"""With fewer points, curves are not smoothed."""
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "svg.fonttype": "none",
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.8,
}

PhaseSeconds = dict[str, list[tuple[float, float]]]


def save_figure(charts: Sequence[Chart], spent: PhaseSeconds, title: str, file: Path) -> None:
    """Saves the charts and the time per phase as a PNG or SVG."""
    count = len(charts) + bool(spent)
    with rc_context(STYLE):
        figure = Figure(figsize=(2 * CHART_INCHES[0], ceil(count / 2) * CHART_INCHES[1] + 0.5), layout="constrained")
        subplots = figure.subplots(ceil(count / 2), 2, squeeze=False).flat
        for chart, axes in zip(charts, subplots, strict=False):
            _draw_chart(axes, chart)
        if spent:
            _draw_phase_seconds(figure.axes[count - 1], spent)
        for axes in figure.axes[count:]:
            axes.remove()
        figure.suptitle(title, fontweight="bold")
        figure.savefig(file, dpi=150, format="svg" if file.suffix == ".svg" else "png")


def _draw_chart(axes: Axes, chart: Chart) -> None:
    for index, curve in enumerate(chart.curves):
        colour, dashes = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        if curve.sparse:
            axes.plot(*_xy(curve), dashes, marker=MARKS[index % len(MARKS)], ms=4, color=colour, label=curve.name)
        elif len(curve.points) < SMOOTH_FROM_POINTS:
            axes.plot(*_xy(curve), dashes, color=colour, label=curve.name)
        else:
            axes.plot(*_xy(curve), color=colour, lw=0.7, alpha=0.35)
            axes.plot(*_xy(smooth(curve)), dashes, color=colour, label=curve.name)
    if chart.scale == "share":
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    elif chart.scale == "log":
        axes.set_yscale("log")
    _label_axes(axes, chart.title, chart.unit, legend=len(chart.curves) > 1)


def _draw_phase_seconds(axes: Axes, spent: PhaseSeconds) -> None:
    steps = [step for step, _ in next(iter(spent.values()))]
    seconds = [[value for _, value in points] for points in spent.values()]
    axes.stackplot(steps, seconds, labels=list(spent), colors=COLOURS, step="mid", lw=0)
    axes.set_ylim(0, HEADROOM * max(map(sum, zip(*seconds, strict=True))))
    _label_axes(axes, "Time", "seconds a step", legend=True)
    axes.legend(loc="upper left", ncols=3)


def _label_axes(axes: Axes, title: str, unit: str, *, legend: bool) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        axes.legend(loc="best")


def _xy(curve: Curve) -> tuple[list[float], list[float]]:
    return [step for step, _ in curve.points], [value for _, value in curve.points]

"""Plots a run's metrics in the terminal, and as a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.errors import ConfigError
from trainer.storage.rollout_file import RunError
from trainer.storage.run_files import METRICS_FILE, read_metrics
from trainer.view.curves import Chart, History, build_charts, phase_seconds, smooth
from trainer.view.panel import format_clock
from trainer.view.terminal_chart import QUIET, draw_chart
from trainer.view.text import format_duration, to_line

DEFAULT_FILE = "curves.png"
WIDTH, HEIGHT = 60, 8
"""The maximal size of a chart in characters; a wide terminal shows two side by side."""
MIN_COLUMN_WIDTH = 46
"""If two columns would be narrower than this, there is one."""
MINUTE_S = 60.0
SMOOTH_FROM_STEPS = 60
"""With this many steps, the terminal shows smoothed curves."""


def plot_run(run: Path, out: Path | None, console: Console) -> None:
    """Prints charts of the run, and saves them to `out` (.svg or PNG), by default as a PNG in the run's folder.

    Raises RunError if there are no metrics.
    """
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
    _save_figure(shown, measured, run, out, console)


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


def _save_figure(shown: Sequence[Chart], measured: History, run: Path, out: Path | None, console: Console) -> None:
    try:
        from trainer.view import figure
    except ImportError as error:
        remedy = "pip install 'mtrl-rl[plot]'"
        if out is not None:
            raise ConfigError(f"image files need matplotlib ({error})", remedy=remedy) from error
        console.print(Text(f"no PNG without matplotlib: {remedy}"), soft_wrap=True)
        return
    file = out or run / DEFAULT_FILE
    try:
        figure.save_figure(
            shown, phase_seconds(measured), f"{run.resolve().name}, {measured[-1]['step']:.0f} steps", file
        )
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})\n  remedy: name another file") from error
    console.print(Text(f"saved to {file}"), soft_wrap=True)

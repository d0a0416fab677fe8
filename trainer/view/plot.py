"""How a run went, read off its metrics: at once in the terminal, and as a PNG or SVG to keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.errors import ConfigError
from trainer.run.file import RunError
from trainer.run.history import NAME, history
from trainer.view.chart import QUIET, drawn
from trainer.view.curves import Chart, History, charts, smooth, spent
from trainer.view.panel import clock, duration
from trainer.view.text import line

PNG = "curves.png"
WIDTH, HEIGHT = 60, 8
"""Of one chart in a terminal, at the most; two stand side by side where there is room."""
NARROW = 46
"""Two charts narrower than this say less than one below the other."""
MINUTE_S = 60.0
DENSE = 60
"""Steps from which on a terminal shows the smoothed curve alone: it has no room for both."""


def plot(run: Path, out: Path | None, console: Console) -> None:
    """The picture goes to `out`, an SVG where it is called one; by default a PNG goes into the run's folder.

    Raises RunError where there is nothing to show.
    """
    measured = history(run / NAME)
    shown = charts(measured)
    if not shown:
        raise RunError(f"{run / NAME}: nothing is measured yet\n  remedy: wait until the first step is over")
    width = min(WIDTH, console.width // 2 - 1) if console.width // 2 > NARROW else min(WIDTH + 20, console.width)
    texts = [_drawn(chart, width) for chart in shown] + [text for text in [_times(measured, width)] if text]
    for row in _rows(texts, 2 if console.width // 2 > NARROW else 1):
        console.print(row)
    _png(shown, measured, run, out, console)


def _drawn(chart: Chart, width: int) -> Text:
    curves = [curve if curve.sparse or len(curve.points) < DENSE else smooth(curve) for curve in chart.curves]
    title = Text.assemble((chart.title, "bold"), (f", {chart.unit}", QUIET))
    return drawn(title, curves, width, HEIGHT, scale=chart.scale)


def _times(measured: History, width: int) -> Text | None:
    sums = {line(name): sum(seconds for _, seconds in points) for name, points in spent(measured).items()}
    whole = sum(sums.values())
    if not whole:
        return None
    told = clock if whole >= MINUTE_S else duration
    text = Text.assemble(("Time", "bold"), (f", {told(whole)} in all\n", QUIET))
    name_width = max(map(len, sums))
    for name, seconds in sums.items():
        text.append(f"{name:>{name_width}} ", QUIET)
        text.append("█" * round(seconds / whole * (width - name_width - 16)), "green")
        text.append(f" {seconds / whole:.0%} {told(seconds)}\n")
    return text


def _rows(texts: Sequence[Text], columns: int) -> Iterator[Table]:
    for row in zip_longest(*[iter(texts)] * columns, fillvalue=Text()):
        table = Table.grid(padding=(0, 2, 1, 0))
        table.add_row(*row)
        yield table


def _png(shown: Sequence[Chart], measured: History, run: Path, out: Path | None, console: Console) -> None:
    try:
        from trainer.view import figure
    except ImportError as error:
        remedy = "pip install -e '.[plot]'"
        if out is not None:
            raise ConfigError(f"a picture needs matplotlib ({error})", remedy=remedy) from error
        console.print(Text(f"no PNG without matplotlib: {remedy}"), soft_wrap=True)
        return
    file = out or run / PNG
    try:
        figure.save(shown, spent(measured), f"{run.resolve().name}, {measured[-1]['step']:.0f} steps", file)
    except OSError as error:
        raise RunError(f"{file}: cannot be written ({error.strerror})\n  remedy: name another file") from error
    console.print(Text(f"drawn in {file}"), soft_wrap=True)

"""Prints rollouts as a table. Rows are laid out here: rich's tables take seconds for thousands of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text as Line

from trainer.rollout.rollout import Rollout
from trainer.storage.rollout_file import Rollouts
from trainer.storage.rollout_summary import RolloutSummary
from trainer.view.text import format_number, format_share, to_line

COLUMNS = ("#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes")
NUMBERS = frozenset({"#", "turns", "tokens", "written", "cached", "reward"})
GAP = "  "
MAX_WIDTH = 24
"""The width of a longer text, in a table that is wider than the terminal: it continues on the next line."""
BOLD, DIM, PLAIN = Style(bold=True), Style(dim=True), Style.null()


def print_table(run: Iterable[Rollout], console: Console) -> None:
    """Prints a row for each rollout, and a summary."""
    stops: Counter[str] = Counter()
    rewards: list[float] = []
    rows: list[tuple[Sequence[str], Style]] = [(COLUMNS, BOLD)]
    for number, summary in _summaries(run):
        stops[summary.stop] += 1
        rewards += [] if summary.reward is None else [summary.reward]
        rows.append((_format_cells(number, summary), DIM if summary.is_infrastructure else PLAIN))
    widths = _choose_widths([cells for cells, _ in rows], console.width)
    lines = ((line, style) for cells, style in rows for line in _lay_out(cells, widths))
    console.print(Segments([Segment(f"{line.rstrip()}\n", style) for line, style in lines]), soft_wrap=True, end="")
    stop_counts = ", ".join(f"{count} {to_line(stop)}" for stop, count in stops.most_common())
    mean = f"; mean reward {sum(rewards) / len(rewards):.3g} of {len(rewards)} scored" if rewards else ""
    total = stops.total()
    text = f"{total} rollout{'' if total == 1 else 's'}{': ' if stop_counts else ''}{stop_counts}{mean}"
    console.print(Line(text), soft_wrap=True)


def _summaries(run: Iterable[Rollout]) -> Iterator[tuple[int, RolloutSummary]]:
    if isinstance(run, Rollouts):
        return run.summaries()
    return enumerate(map(RolloutSummary.from_rollout, run))


def _format_cells(number: int, summary: RolloutSummary) -> tuple[str, ...]:
    return (
        str(number),
        to_line(summary.task),
        to_line(f"{summary.group}/{summary.index}"),
        to_line(summary.stop),
        str(summary.turns),
        str(summary.tokens),
        str(summary.written),
        format_share(summary.cached, summary.asked),
        format_number(summary.reward),
        to_line(", ".join(f"{count} {outcome}" for outcome, count in summary.outcomes.most_common())),
    )


def _choose_widths(rows: Iterable[Sequence[str]], available: int) -> list[int]:
    """The width of each column. A table that is too wide has narrower texts: that is better than missing columns."""
    widths = [max(map(cell_len, set(column))) for column in zip(*rows, strict=True)]
    if sum(widths) + len(GAP) * (len(widths) - 1) <= available:
        return widths
    limits = (width if name in NUMBERS else MAX_WIDTH for name, width in zip(COLUMNS, widths, strict=True))
    return [min(width, limit) for width, limit in zip(widths, limits, strict=True)]


def _lay_out(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row."""
    folded = [
        [cell] if cell_len(cell) <= width else chop_cells(cell, width)
        for cell, width in zip(cells, widths, strict=True)
    ]
    for pieces in zip_longest(*folded, fillvalue=""):
        yield GAP.join(
            " " * (width - cell_len(piece)) + piece if name in NUMBERS else piece + " " * (width - cell_len(piece))
            for name, piece, width in zip(COLUMNS, pieces, widths, strict=True)
        )

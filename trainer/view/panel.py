"""Formats the counters of rollouts as a panel of constant size, or as one line for logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gateway.plural import format_count
from gateway.types import Outcome
from trainer.rollout.rollout import StopReason
from trainer.view.counters import STATES, CounterSnapshot
from trainer.view.text import format_duration, format_share, to_line

MAX_WIDTH = 100
"""Panels are not wider than this."""
MARGIN = 2
"""Space for the `^C` that a terminal prints after the panel, which must not wrap."""
MAX_NAME = 24
"""Longer tool names are shortened, so that their durations stay visible."""
QUIET, BAD = "dim", "red"
StyledText = tuple[str, str]
"""A text with its style."""


def rollout_panel(counters: CounterSnapshot, per_s: float, width: int, *, over: bool = False) -> RenderableType:
    """The panel for rollouts; `per_s` is the current rate of generated tokens. Uses the 16 standard colours."""
    return frame(rollout_rows(counters, per_s), _format_times(counters, over=over), width)


def frame(content: RenderableType, when: str, width: int) -> Panel:
    """A panel with the elapsed time as its title."""
    return Panel(
        content,
        title=Text(when, style="default"),
        title_align="right",
        border_style=QUIET,
        width=min(width - MARGIN, MAX_WIDTH),
    )


def labeled_rows(**content: RenderableType) -> Table:
    """A table with a labelled row for each argument."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style=QUIET, no_wrap=True, width=8)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, row in content.items():
        table.add_row(name, row)
    return table


def rollout_rows(counters: CounterSnapshot, per_s: float) -> Table:
    """The rows of the panel for rollouts."""
    return labeled_rows(
        rollouts=progress_bar(counters.ended, counters.total),
        now=join_texts(_format_count(counters.states.get(state, 0), state) for state in STATES),
        tokens=join_texts(_format_tokens(counters, per_s)),
        slowest=join_texts(_format_slowest_tool(counters)),
        answers=join_texts(_format_outcomes(counters.outcomes)),
        ended=join_texts([*_format_retried(counters), *_format_counts(counters.stops.items())]),
    )


def format_status(counters: CounterSnapshot, per_s: float, *, over: bool = False) -> str:
    """The content of the panel as one line for logs."""
    of = f" of {counters.total}" if counters.total else ""
    sections = (
        [(f"{counters.ended}{of} rollouts", "")],
        [_format_count(count, state) for state in STATES if (count := counters.states.get(state, 0))],
        _format_tokens(counters, per_s),
        [
            (f"slowest {text}" if not index else text, style)
            for index, (text, style) in enumerate(_format_slowest_tool(counters))
        ],
        [] if not counters.durations and not counters.outcomes else _format_outcomes(counters.outcomes),
        [*_format_retried(counters), *_format_counts(counters.stops.items())],
        [(_format_times(counters, over=over), "")],
    )
    return "; ".join(", ".join(text for text, _ in section) for section in sections if section)


def progress_bar(done: float, total: int) -> RenderableType:
    """A bar with its count, of what is done whole; only the count if the total is unknown."""
    if not total:
        return Text(f"{int(done):,}")
    drawn = ProgressBar(total, done, style="bright_black", complete_style="green", finished_style="green")
    return with_text(drawn, Text.assemble((f"{int(done):,}", "bold"), f" of {total:,}"))


def with_text(content: RenderableType, text: Text) -> Table:
    """A row with a text at its right end."""
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(content, text)
    return row


def _format_count(count: int, what: str) -> StyledText:
    return f"{count:,} {what}", "" if count else QUIET


def _format_tokens(counters: CounterSnapshot, per_s: float) -> list[StyledText]:
    return [
        (f"{per_s:,.0f} per s", "bold"),
        (f"{counters.written:,} in {counters.turns:,} turns", ""),
        (f"cached {format_share(counters.cached, counters.possible)} of possible", ""),
    ]


def _format_slowest_tool(counters: CounterSnapshot) -> list[StyledText]:
    if counters.slowest is None:
        return []
    name, waits = counters.slowest
    shown = to_line(name)
    shown = shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 1]}…"
    return [
        (shown, "bold"),
        (f"p50 {format_duration(waits.quantile_s(0.5))}", ""),
        (f"p95 {format_duration(waits.quantile_s(0.95))}", ""),
        (f"max {format_duration(waits.longest_s)}", ""),
        (format_count(waits.count, "call"), ""),
    ]


def _format_outcomes(outcomes: Mapping[Outcome, int]) -> list[StyledText]:
    failed = [(outcome, count) for outcome, count in outcomes.items() if outcome is not Outcome.OK]
    return [(f"{outcomes.get(Outcome.OK, 0):,} ok", ""), *_format_counts(failed)]


def _format_counts(counts: Iterable[tuple[Outcome | StopReason, int]]) -> list[StyledText]:
    """Counts in descending order, infrastructure failures first and in red so that a narrow terminal shows them."""
    ranked = sorted(counts, key=lambda item: (not item[0].is_infrastructure, -item[1]))
    return [(f"{count:,} {what}", BAD if what.is_infrastructure else "") for what, count in ranked]


def _format_retried(counters: CounterSnapshot) -> list[StyledText]:
    return [(f"{counters.retried:,} retried", "")] if counters.retried else []


def _format_times(counters: CounterSnapshot, *, over: bool) -> str:
    return format_times(counters.elapsed_s, None if over else counters.left_s)


def format_times(elapsed_s: float, left_s: float | None) -> str:
    """The elapsed and the remaining time."""
    return format_clock(elapsed_s) if left_s is None else f"{format_clock(elapsed_s)}, {format_clock(left_s)} left"


def join_texts(pieces: Iterable[StyledText]) -> Text:
    """Texts joined by dots."""
    text = Text()
    for piece in pieces:
        text.append(" · " if text else "", QUIET)
        text.append(*piece)
    return text if text else Text("none yet", QUIET)


def format_clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

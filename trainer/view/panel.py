"""One glance says whether a run is well: as a panel that keeps its shape, or as one plain line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gateway.types import Outcome
from trainer.run.rollout import StopReason
from trainer.view.counts import STATES, Seen
from trainer.view.text import line, share

WIDTH = 100
"""Wider lines are harder to read."""
ROOM = 2
"""A terminal echoes `^C` behind the panel; were that to wrap, the picture would slip by a line."""
NAME = 24
"""More of a tool's name than this would push its times out of sight."""
QUIET, BAD = "dim", "red"
Piece = tuple[str, str]
"""A text and its style."""


def panel(seen: Seen, per_s: float, width: int, *, over: bool = False) -> RenderableType:
    """`per_s` is the tokens written per second of late. Only colours that every palette has, light or dark."""
    rows = Table.grid(padding=(0, 1), expand=True)
    rows.add_column(style=QUIET, no_wrap=True, width=8)
    rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    rows.add_row("rollouts", _bar(seen))
    rows.add_row("now", _joined(_plain(seen.states.get(state, 0), state) for state in STATES))
    rows.add_row("tokens", _joined(_tokens(seen, per_s)))
    rows.add_row("slowest", _joined(_slowest(seen)))
    rows.add_row("answers", _joined(_outcomes(seen.outcomes)))
    rows.add_row("ended", _joined([*_refilled(seen), *_counted(seen.stops.items())]))
    return Panel(
        rows,
        title=Text(_when(seen, over=over), style="default"),
        title_align="right",
        border_style=QUIET,
        width=min(width - ROOM, WIDTH),
    )


def plain(seen: Seen, per_s: float, *, over: bool = False) -> str:
    """The same for logs."""
    of = f" of {seen.total}" if seen.total else ""
    sections = (
        [(f"{seen.ended}{of} rollouts", "")],
        [_plain(count, state) for state in STATES if (count := seen.states.get(state, 0))],
        _tokens(seen, per_s),
        [(f"slowest {text}" if not place else text, style) for place, (text, style) in enumerate(_slowest(seen))],
        [] if not seen.waits and not seen.outcomes else _outcomes(seen.outcomes),
        [*_refilled(seen), *_counted(seen.stops.items())],
        [(_when(seen, over=over), "")],
    )
    return "; ".join(", ".join(text for text, _ in section) for section in sections if section)


def _bar(seen: Seen) -> RenderableType:
    if not seen.total:
        return Text(f"{seen.ended:,}")
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(seen.total, seen.ended, style="bright_black", complete_style="green", finished_style="green")
    row.add_row(bar, Text.assemble((f"{seen.ended:,}", "bold"), f" of {seen.total:,}"))
    return row


def _plain(count: int, what: str) -> Piece:
    return f"{count:,} {what}", "" if count else QUIET


def _tokens(seen: Seen, per_s: float) -> list[Piece]:
    return [
        (f"{per_s:,.0f} per s", "bold"),
        (f"{seen.written:,} in {seen.turns:,} turns", ""),
        (f"cached {share(seen.cached, seen.possible)} of possible", ""),
    ]


def _slowest(seen: Seen) -> list[Piece]:
    if seen.slowest is None:
        return []
    name, waits = seen.slowest
    shown = line(name)
    shown = shown if len(shown) <= NAME else f"{shown[: NAME - 1]}…"
    return [
        (shown, "bold"),
        (f"p50 {_seconds(waits.within_s(0.5))}", ""),
        (f"p95 {_seconds(waits.within_s(0.95))}", ""),
        (f"max {_seconds(waits.longest_s)}", ""),
        (f"{waits.count:,} call{'' if waits.count == 1 else 's'}", ""),
    ]


def _outcomes(outcomes: Mapping[Outcome, int]) -> list[Piece]:
    failed = [(outcome, count) for outcome, count in outcomes.items() if outcome is not Outcome.OK]
    return [(f"{outcomes.get(Outcome.OK, 0):,} ok", ""), *_counted(failed)]


def _counted(counts: Iterable[tuple[Outcome | StopReason, int]]) -> list[Piece]:
    """What infrastructure did comes first and in red, so that no narrow terminal hides it; then what there is most."""
    ranked = sorted(counts, key=lambda item: (not item[0].infrastructure, -item[1]))
    return [(f"{count:,} {what}", BAD if what.infrastructure else "") for what, count in ranked]


def _refilled(seen: Seen) -> list[Piece]:
    return [(f"{seen.refilled:,} made anew", "")] if seen.refilled else []


def _when(seen: Seen, *, over: bool) -> str:
    since = _clock(seen.elapsed_s)
    return since if over or seen.left_s is None else f"{since}, {_clock(seen.left_s)} left"


def _joined(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(" · " if text else "", QUIET)
        text.append(*piece)
    return text if text else Text("none yet", QUIET)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"

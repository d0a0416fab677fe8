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
    return framed(rollouts(seen, per_s), _when(seen, over=over), width)


def framed(content: RenderableType, when: str, width: int) -> Panel:
    return Panel(
        content,
        title=Text(when, style="default"),
        title_align="right",
        border_style=QUIET,
        width=min(width - ROOM, WIDTH),
    )


def rows(**content: RenderableType) -> Table:
    """Each under its name."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style=QUIET, no_wrap=True, width=8)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, row in content.items():
        table.add_row(name, row)
    return table


def rollouts(seen: Seen, per_s: float) -> Table:
    return rows(
        rollouts=bar(seen.ended, seen.total),
        now=joined(_plain(seen.states.get(state, 0), state) for state in STATES),
        tokens=joined(_tokens(seen, per_s)),
        slowest=joined(_slowest(seen)),
        answers=joined(_outcomes(seen.outcomes)),
        ended=joined([*_refilled(seen), *_counted(seen.stops.items())]),
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


def bar(done: int, total: int) -> RenderableType:
    if not total:
        return Text(f"{done:,}")
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    drawn = ProgressBar(total, done, style="bright_black", complete_style="green", finished_style="green")
    row.add_row(drawn, Text.assemble((f"{done:,}", "bold"), f" of {total:,}"))
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
        (f"p50 {duration(waits.within_s(0.5))}", ""),
        (f"p95 {duration(waits.within_s(0.95))}", ""),
        (f"max {duration(waits.longest_s)}", ""),
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
    return when(seen.elapsed_s, None if over else seen.left_s)


def when(elapsed_s: float, left_s: float | None) -> str:
    return clock(elapsed_s) if left_s is None else f"{clock(elapsed_s)}, {clock(left_s)} left"


def joined(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(" · " if text else "", QUIET)
        text.append(*piece)
    return text if text else Text("none yet", QUIET)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"

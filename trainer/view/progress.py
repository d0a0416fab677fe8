"""Live progress of rollouts and of the demo's warm start: a panel in a terminal, otherwise occasional log lines."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread
from time import monotonic
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from trainer.storage.run_status import RunStatus
from trainer.view.counters import STATES, CounterSnapshot, RolloutCounters
from trainer.view.panel import format_status, rollout_panel

log = logging.getLogger(__name__)

PANEL_S = 0.2
"""The time between two updates of the panel."""
RATE_WINDOW_S = 10.0
"""The window over which tokens per second are measured."""
JOIN_TIMEOUT_S = 2.0


class Display(ABC):
    """A context manager that shows progress from a thread, and on exit shows the final state."""

    def __init__(self, console: Console, every_s: float) -> None:
        """`every_s` is the interval of log lines without a terminal."""
        self.console = console
        alive = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if alive else None
        self._period_s = PANEL_S if alive else every_s
        self._ended = Event()
        self._thread = Thread(target=self._refresh, name="progress", daemon=True)

    @abstractmethod
    def render(self, *, over: bool) -> RenderableType:
        """The panel for a terminal."""

    @abstractmethod
    def format_line(self, *, over: bool) -> str:
        """A log line without a terminal; an empty one is not printed."""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(JOIN_TIMEOUT_S)
        self._draw()
        if self._live:
            self._live.stop()

    def _refresh(self) -> None:
        while not self._ended.wait(self._period_s):
            self._draw()

    def _draw(self) -> None:
        over = self._ended.is_set()
        try:
            if self._live:
                self._live.update(self.render(over=over), refresh=True)
            elif line := self.format_line(over=over):
                self.console.file.write(line + "\n")
                self.console.file.flush()
        except Exception as problem:  # boundary: a closed terminal must not end the run
            log.debug("progress cannot be shown: %s", problem)


class TokenRate:
    """Generated tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])

    def per_s(self, counters: CounterSnapshot, *, over: bool) -> float:
        if over:
            return counters.written / max(counters.elapsed_s, 1e-9)
        if counters.elapsed_s < self._samples[-1][0]:
            self._samples = deque([(0.0, 0)])  # The counters were restarted.
        self._samples.append((counters.elapsed_s, counters.written))
        while self._samples[0][0] < counters.elapsed_s - RATE_WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        since_s, before = self._samples[0]
        return (counters.written - before) / max(counters.elapsed_s - since_s, 1e-9)


class RolloutProgress(RolloutCounters, Display):
    """A `Watch` that counts rollouts and shows their progress."""

    def __init__(
        self, total: int = 0, *, phase: str = "", console: Console | None = None, every_s: float = 10.0
    ) -> None:
        """`total` is the number of rollouts, `phase` what they are for, `every_s` the interval of log lines."""
        RolloutCounters.__init__(self, total)
        Display.__init__(self, console or Console(), every_s)
        self._rate, self._status_rate = TokenRate(), TokenRate()
        self._phase, self._phase_began = phase, monotonic()
        self.read_sampled: Callable[[], int] | None = None
        """Reads how many tokens the engine has sampled, if it says so while turns are being written."""

    def begin_phase(self, phase: str) -> None:
        """Says what the next rollouts are for."""
        self._phase, self._phase_began = phase, monotonic()

    def render(self, *, over: bool) -> RenderableType:
        counters = self._moving_snapshot()
        return rollout_panel(counters, self._rate.per_s(counters, over=over), self.console.width, over=over)

    def format_line(self, *, over: bool) -> str:
        counters = self._moving_snapshot()
        return format_status(counters, self._rate.per_s(counters, over=over), over=over)

    def status(self) -> RunStatus:
        """What is being done now, for other processes."""
        counters = self._moving_snapshot()
        left_s = counters.left_s
        return make_status(
            counters,
            self._status_rate.per_s(counters, over=False),
            phase=self._phase,
            phase_s=monotonic() - self._phase_began,
            left_s=left_s,
            left_of="" if left_s is None else "of the rollouts",
        )

    def _moving_snapshot(self) -> CounterSnapshot:
        """The counters, with the tokens of turns that are still being written."""
        counters = self.snapshot()
        return replace(counters, written=max(counters.written, self.read_sampled())) if self.read_sampled else counters


def make_status(counters: CounterSnapshot, written_per_s: float, **values: Any) -> RunStatus:
    """A run's status from the counters of its rollouts, and further fields."""
    tool, durations = counters.slowest or ("", None)
    values |= {state: counters.states.get(state, 0) for state in STATES}
    return RunStatus(
        ended=counters.ended,
        total=counters.total,
        turns=counters.turns,
        written=counters.written,
        written_per_s=written_per_s,
        slowest_tool=tool,
        slowest_p95_s=durations.quantile_s(0.95) if durations else None,
        **values,
    )


LOG_LINES = 5
"""Lines about something that is made, without a terminal."""


@contextmanager
def show_making(console: Console, opening: str = "") -> Iterator[Callable[[int, int, str], None]]:
    """Shows how much of something is made, and how long the rest takes. `opening` is printed at the first word of it.

    Yields a function that takes what is made, what is wanted, and what is being done.
    """
    started, lines = monotonic(), -1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal)

    def report(made: int, wanted: int, doing: str) -> None:
        nonlocal lines
        if lines < 0:
            lines = 0
            if opening:
                console.print(opening)
            bar.start()
            bar.add_task(doing)
        bar.update(bar.task_ids[0], completed=made, total=wanted, description=doing)
        if not console.is_terminal and made * LOG_LINES >= lines * wanted:
            lines += 1
            spent = monotonic() - started
            # The first takes longer than all others.
            left = f", about {spent / made * (wanted - made):.0f} s left" if 1 < made < wanted else ""
            console.print(f"{made} of {wanted} after {spent:.0f} s{left}: {doing}", markup=False)

    try:
        yield report
    finally:
        bar.stop()


@contextmanager
def show_warm_start(console: Console) -> Iterator[Callable[[int, int, float], None]]:
    """Shows the warm start of the demo model: yields a function to call with step, total steps and loss."""
    opening = "no model is given: a tiny one is built and warm-started once, and cached for later runs"
    with show_making(console, opening) as report:
        yield lambda step, steps, loss: report(step, steps, f"warm start, loss {loss:.3f}")

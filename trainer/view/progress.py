"""A run is watched while it goes: a panel in a terminal, now and then a line elsewhere, the same numbers as metrics."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from trainer.view.counts import Counts, Seen
from trainer.view.panel import panel, plain

log = logging.getLogger(__name__)

PANEL_S = 0.2
"""Five pictures a second look alive and cost next to nothing."""
LATE_S = 10.0
"""Tokens per second are those of this long."""
LEAVE_S = 2.0


class Display(ABC):
    """A block in which something is shown. Leaving it, however that comes, leaves the last picture."""

    def __init__(self, console: Console, every_s: float) -> None:
        """`every_s` is for lines, where there is no terminal."""
        self.console = console
        alive = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if alive else None
        self._period_s = PANEL_S if alive else every_s
        self._over = Event()
        self._thread = Thread(target=self._go_on, name="progress", daemon=True)

    @abstractmethod
    def picture(self, *, over: bool) -> RenderableType:
        """For a terminal."""

    @abstractmethod
    def line(self, *, over: bool) -> str:
        """For anything else; nothing where there is nothing to say."""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LEAVE_S)
        self._draw()
        if self._live:
            self._live.stop()

    def _go_on(self) -> None:
        while not self._over.wait(self._period_s):
            self._draw()

    def _draw(self) -> None:
        over = self._over.is_set()
        try:
            if self._live:
                self._live.update(self.picture(over=over), refresh=True)
            elif line := self.line(over=over):
                self.console.file.write(line + "\n")
                self.console.file.flush()
        except Exception as problem:  # boundary: a terminal that has gone must not take the run with it
            log.debug("progress cannot be shown: %s", problem)


class Pace:
    """Tokens per second of late."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, int]] = deque([(0.0, 0)])

    def per_s(self, seen: Seen, *, over: bool) -> float:
        if over:
            return seen.written / max(seen.elapsed_s, 1e-9)
        if seen.elapsed_s < self._late[-1][0]:
            self._late = deque([(0.0, 0)])  # It is counted from the start again.
        self._late.append((seen.elapsed_s, seen.written))
        while self._late[0][0] < seen.elapsed_s - LATE_S and len(self._late) > 2:
            self._late.popleft()
        since_s, before = self._late[0]
        return (seen.written - before) / max(seen.elapsed_s - since_s, 1e-9)


class Progress(Counts, Display):
    """A `Watch`, and a block in which it is shown."""

    def __init__(self, total: int = 0, *, console: Console | None = None, every_s: float = 10.0) -> None:
        """`total` is how many rollouts there will be; `every_s` is for lines, where there is no terminal."""
        Counts.__init__(self, total)
        Display.__init__(self, console or Console(), every_s)
        self._pace = Pace()

    def picture(self, *, over: bool) -> RenderableType:
        seen = self.seen()
        return panel(seen, self._pace.per_s(seen, over=over), self.console.width, over=over)

    def line(self, *, over: bool) -> str:
        seen = self.seen()
        return plain(seen, self._pace.per_s(seen, over=over), over=over)

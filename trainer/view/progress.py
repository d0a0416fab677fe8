"""A run is watched while it goes: a panel in a terminal, now and then a line elsewhere, the same numbers as metrics."""

from __future__ import annotations

import logging
from collections import deque
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from trainer.view.counts import Counts
from trainer.view.panel import panel, plain

log = logging.getLogger(__name__)

PANEL_S = 0.2
"""Five pictures a second look alive and cost next to nothing."""
LATE_S = 10.0
"""Tokens per second are those of this long."""
LEAVE_S = 2.0


class Progress(Counts):
    """A `Watch`, and a block in which it is shown. Leaving the block, however that comes, leaves the last picture."""

    def __init__(self, total: int = 0, *, console: Console | None = None, every_s: float = 10.0) -> None:
        """`total` is how many rollouts there will be; `every_s` is for lines, where there is no terminal."""
        super().__init__(total)
        self.console = console or Console()
        alive = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = Live(console=self.console, auto_refresh=False) if alive else None
        self._period_s = PANEL_S if alive else every_s
        self._late: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._over = Event()
        self._thread = Thread(target=self._go_on, name="progress", daemon=True)

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
        seen, over = self.seen(), self._over.is_set()
        per_s = seen.written / max(seen.elapsed_s, 1e-9) if over else self._pace(seen.elapsed_s, seen.written)
        try:
            if self._live:
                self._live.update(panel(seen, per_s, self.console.width, over=over), refresh=True)
            else:
                self.console.file.write(plain(seen, per_s, over=over) + "\n")
                self.console.file.flush()
        except Exception as problem:  # boundary: a terminal that has gone must not take the run with it
            log.debug("progress cannot be shown: %s", problem)

    def _pace(self, elapsed_s: float, written: int) -> float:
        self._late.append((elapsed_s, written))
        while self._late[0][0] < elapsed_s - LATE_S and len(self._late) > 2:
            self._late.popleft()
        since_s, before = self._late[0]
        return (written - before) / max(elapsed_s - since_s, 1e-9)

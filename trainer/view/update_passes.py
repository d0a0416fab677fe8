"""How far an update is: its micro-batches, tokens per second, and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainer.view.panel import progress_bar

LEAST_SHARE = 0.05
"""The share of the first micro-batch that shows a pace."""


class UpdatePasses:
    """The micro-batches of an update; told by the thread that trains, read by the one that draws."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._passed_at = clock()
        self.passes, self.total, self._tokens = 0.0, 0, 0

    def on_pass(self, passes: float, total: int, tokens: int) -> None:
        """Notes how many micro-batches of all were passed, the last in part, and their tokens. An update begins with
        0."""
        self._passed_at = self._clock()
        if not passes:
            self._began = self._passed_at
        self.passes, self.total, self._tokens = passes, total, tokens

    @property
    def left_s(self) -> float | None:
        """The remaining seconds, once a part of a micro-batch has shown the pace."""
        if self.passes < LEAST_SHARE:
            return None
        left_s = (self._passed_at - self._began) / self.passes * (self.total - self.passes)
        return max(0.0, left_s - (self._clock() - self._passed_at))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the passed micro-batches per second."""
        return self._tokens / max(self._passed_at - self._began, 1e-9)

    def describe(self) -> str:
        """The update in words, for a line of a log."""
        return f"{int(self.passes)} of {self.total} micro-batches{self._describe_pace()}"

    def row(self) -> RenderableType:
        """A row of the panel."""
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(progress_bar(self.passes, self.total), Text(f"micro-batches{self._describe_pace()}"))
        return row

    def _describe_pace(self) -> str:
        return f", {self.tokens_per_s:,.0f} tokens per s" if self.passes >= LEAST_SHARE else ""

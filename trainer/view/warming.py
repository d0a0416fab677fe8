"""The demo's model is made in front of the user, once: a bar, or a few lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 5
"""Where there is no terminal."""


@contextmanager
def warming(console: Console) -> Iterator[Callable[[int, int, float], None]]:
    """Told step, steps in all, and loss; nothing is shown for a model that is there already."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    shown = False

    def told(step: int, steps: int, loss: float) -> None:
        nonlocal shown
        if not shown:
            shown = True
            console.print("no model is named: a tiny one is made and warm-started, once; it is kept for later runs")
            if console.is_terminal:
                bar.start()
                bar.add_task("warm start", total=steps)
        if console.is_terminal:
            bar.update(bar.task_ids[0], completed=step, description=f"warm start, loss {loss:.3f}")
        elif step % max(1, steps // LINES) == 0:
            console.print(f"warm start: step {step} of {steps}, loss {loss:.3f}")

    try:
        yield told
    finally:
        if shown and console.is_terminal:
            bar.stop()

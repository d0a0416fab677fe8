"""Measures how long the event loop was held, by how late a short sleep ends.

While the loop is held, no call, no health check and no signal is answered. What can take long therefore runs
elsewhere, and this shows whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, process_time, thread_time

import anyio

INTERVAL_S = 0.02
NOTICED_S = 0.005
"""A shorter delay is the operating system's scheduling."""


class LoopWatchdog:
    """Counts and measures the times in which the event loop was held; `run` does so until it is cancelled.

    A delay has three causes: the loop's own work, threads that hold the interpreter, and a machine that is busy with
    other processes. Processor time tells them apart.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self.count = 0
        self.total_s = self.longest_s = 0.0
        self.longest_own_s = 0.0
        """The longest time for which the loop's own thread computed."""
        self.longest_process_s = 0.0
        """The longest time for which this process computed while the loop waited, threads that hold the interpreter
        included; other processes are not."""
        self._longest_since_s = 0.0
        self.listeners: list[Callable[[float], None]] = []
        """Called with the seconds of each time."""

    async def run(self) -> None:
        while True:
            due = monotonic() + self._interval_s
            own_s, process_s = thread_time(), process_time()
            await anyio.sleep(self._interval_s)
            self.record(monotonic() - due, thread_time() - own_s, process_time() - process_s)

    def record(self, held_s: float, own_s: float = 0.0, process_s: float = 0.0) -> None:
        """Counts one time, with the processor time used in it; those too short to notice are left out."""
        if held_s < NOTICED_S:
            return
        self.count += 1
        self.total_s += held_s
        self.longest_s = max(self.longest_s, held_s)
        self.longest_own_s = max(self.longest_own_s, min(held_s, own_s))
        self.longest_process_s = max(self.longest_process_s, min(held_s, process_s))
        self._longest_since_s = max(self._longest_since_s, held_s)
        for listener in self.listeners:
            listener(held_s)

    def take_longest(self) -> float:
        """The longest time since the last call of this method, in seconds."""
        longest_s, self._longest_since_s = self._longest_since_s, 0.0
        return longest_s

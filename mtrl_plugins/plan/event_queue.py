"""The clock of a simulation: events in the order of their time, and processes that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any


class Signal:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.waiters: list[Process] = []


Process = Iterator[float | Signal]
"""A generator that yields seconds to wait, or a signal to wait for."""


class EventQueue:
    """Runs actions at simulated times; those of the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._added = 0
        self._is_stopped = False

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Calls `action(argument)` at a time, which must not be in the past."""
        self._added += 1
        heappush(self._events, (time, self._added, action, argument))

    def start(self, process: Process) -> None:
        """Runs a process until its first wait."""
        self._resume(process)

    def notify(self, signal: Signal) -> None:
        """Resumes the processes that wait for a signal, after the events of this moment that were added before."""
        waiters, signal.waiters = signal.waiters, []
        for process in waiters:
            self.at(self.now, self._resume, process)

    def stop(self) -> None:
        """Ends `run` after the present event."""
        self._is_stopped = True

    def run(self) -> None:
        """Runs events until there are no more, or until `stop`."""
        events = self._events
        while events and not self._is_stopped:
            self.now, _, action, argument = heappop(events)
            action(argument)

    def _resume(self, process: Process) -> None:
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Signal):
            wait.waiters.append(process)
        else:
            self.at(self.now + wait, self._resume, process)

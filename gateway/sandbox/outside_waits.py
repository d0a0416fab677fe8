"""How long what runs in a sandbox has waited for something outside: for a host, or an answer to its own question.

Quick waits do not count. Else a program that hangs could look as if it waited, by opening connections all the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SLOW_S = 1.0
"""A wait that is shorter is the usual course of things."""
KEPT_WAITS = 256
"""Slow waits that are kept; later ones push out the first."""


class OutsideWaits:
    """The waits of one sandbox or server; threads may share it."""

    def __init__(self) -> None:
        self._open: dict[object, float] = {}
        self._ended: deque[tuple[float, float]] = deque(maxlen=KEPT_WAITS)
        self._lock = Lock()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """A block that waits for something outside."""
        began, key = time.monotonic(), object()
        with self._lock:
            self._open[key] = began
        try:
            yield
        finally:
            with self._lock:
                del self._open[key]
                if time.monotonic() - began >= SLOW_S:
                    self._ended.append((began, time.monotonic()))

    @property
    def is_slow(self) -> bool:
        """Whether it waits now, and has done so for long."""
        now = time.monotonic()
        with self._lock:
            return any(now - began >= SLOW_S for began in self._open.values())

    def seconds_since(self, moment: float) -> float:
        """How long it has waited since a moment of `time.monotonic`; waits at the same time count once."""
        now = time.monotonic()
        with self._lock:
            waits = [*self._ended, *((began, now) for began in self._open.values() if now - began >= SLOW_S)]
        total, covered = 0.0, moment
        for began, ended in sorted(waits):
            total += max(0.0, ended - max(began, covered))
            covered = max(covered, ended)
        return total

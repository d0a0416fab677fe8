"""Measures one worker from the training process: how long it takes between turns, and when it has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable


class WorkerClock:
    """Rollouts are in the worker's hands, or wait for the engine; a worker is idle while it has none in its hands."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._held = now, dict[int, float]()
        self._began = self._idle_since = now()
        self._idle_s = self._turn_s = 0.0
        self._turns = 0

    def hold(self, rollout: int) -> None:
        """A rollout is in the worker's hands."""
        now = self._now()
        if not self._held:
            self._idle_s += now - self._idle_since
        self._held[rollout] = now

    def release(self, rollout: int) -> None:
        """A rollout waits for the engine, or has ended."""
        held_since = self._held.pop(rollout, None)
        if held_since is None:
            return
        now = self._now()
        self._turn_s += now - held_since
        self._turns += 1
        if not self._held:
            self._idle_since = now

    def take_metrics(self, name: str) -> dict[str, float]:
        """The share of time without work, and the mean seconds of a turn, since the last call."""
        now = self._now()
        if not self._held:
            self._idle_s += now - self._idle_since
            self._idle_since = now
        metrics = {f"workers/idle/{name}": self._idle_s / (now - self._began)} if now > self._began else {}
        if self._turns:
            metrics[f"workers/turn_s/{name}"] = self._turn_s / self._turns
        self._began, self._idle_s, self._turn_s, self._turns = now, 0.0, 0.0, 0
        return metrics

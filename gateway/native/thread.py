"""Blocking code runs in worker threads; one that never returns keeps its place, so that threads cannot pile up."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread

log = logging.getLogger(__name__)

MOST = 256
"""Threads of one toolset; calls that wait for one are under their own deadlines."""


class Threads:
    def __init__(self, most: int = MOST) -> None:
        self._places = anyio.Semaphore(most, fast_acquire=True)
        # anyio gives a place back when the wait ends; ours is given back when the thread does.
        self._unlimited = anyio.CapacityLimiter(math.inf)

    @property
    def free(self) -> int:
        return self._places.value

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Awaits an async function here; runs any other in a thread, which cancellation can only stop waiting for."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        await self._places.acquire()
        work = _Work(partial(function, *args, **kwargs), self._places.release)
        try:
            value = await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._unlimited)
        finally:
            work.leave()
        return await value if inspect.isawaitable(value) else value


class _Work:
    """One piece of work, and the agreement on who gives its place back: whoever of caller and thread ends last."""

    def __init__(self, work: Callable[[], Any], release: Callable[[], None]) -> None:
        self._work, self._release = work, release
        self._lock = Lock()
        self._begun = self._ended = self._abandoned = False

    def __call__(self) -> Any:
        with self._lock:
            if self._abandoned:
                return None
            self._begun = True
        try:
            return self._work()
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            late = self._abandoned
        if late:
            try:
                anyio.from_thread.run_sync(self._release)
            except RuntimeError:  # the event loop is gone, and with it the place
                log.debug("a thread outlived its event loop")

    def leave(self) -> None:
        """The caller waits no longer. A thread that has not begun will not; one that runs keeps the place."""
        with self._lock:
            self._abandoned = True
            running = self._begun and not self._ended
        if not running:
            self._release()

"""Runs blocking functions in a bounded number of threads.

A thread that never returns keeps its slot even after its caller gave up, so that stuck threads cannot pile up.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import anyio
import anyio.to_thread
from anyio.lowlevel import EventLoopToken, RunVar, current_token

from gateway.await_user_code import await_user_code
from gateway.user_code import UserCode, run_contained

log = logging.getLogger(__name__)

MAX_THREADS = 256
"""Threads of one toolset. Calls that wait for a slot are limited by their own deadlines."""


class ThreadPool:
    """A limit on concurrent threads; async functions are awaited without one."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._slots = anyio.Semaphore(max_threads, fast_acquire=True)
        # anyio's limiter frees its slot when the caller stops waiting; ours when the thread ends.
        self._unlimited = anyio.CapacityLimiter(math.inf)

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Awaits an async function, or runs another one in a thread. Cancelling abandons a running thread.

        Raises UserCodeError for what is no `Exception`.
        """
        if inspect.iscoroutinefunction(function):
            with UserCode():
                return await await_user_code(function(*args, **kwargs))
        await self._slots.acquire()
        call = _ThreadCall(partial(run_contained, function, *args, **kwargs), self._slots.release, current_token())
        try:
            value = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._unlimited)
        finally:
            call.abandon()
        if not inspect.isawaitable(value):
            return value
        with UserCode():
            return await await_user_code(value)


class _ThreadCall:
    """One call in a thread. Its slot is released by the caller or the thread, whichever ends last."""

    def __init__(self, call: Callable[[], Any], release: Callable[[], None], loop: EventLoopToken) -> None:
        self._call, self._release, self._loop = call, release, loop
        self._lock = Lock()
        self._started = self._finished = self._abandoned = False

    def __call__(self) -> Any:
        with self._lock:
            if self._abandoned:
                return None
            self._started = True
        try:
            return self._call()
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._finished = True
            abandoned = self._abandoned
        if abandoned:
            try:
                call_soon(self._loop, self._release)
            except RuntimeError:  # The event loop has ended, and the semaphore with it.
                log.debug("a thread outlived its event loop")

    def abandon(self) -> None:
        """The caller stops waiting: a call that has not started is cancelled, a running one keeps its slot."""
        with self._lock:
            self._abandoned = True
            is_running = self._started and not self._finished
        if not is_running:
            self._release()


def call_soon(loop: EventLoopToken, function: Callable[[], None]) -> None:
    """Lets an event loop call the function, without waiting: one that is about to end takes it and answers nobody,
    and a thread that waits for it would keep the process from ending."""
    native: Any = loop.native_token
    native.call_soon_threadsafe(function)


_shared: RunVar[ThreadPool] = RunVar("threads")


def shared_threads() -> ThreadPool:
    """The pool of this event loop for code that has none of its own."""
    pool = _shared.get(None)
    if pool is None:
        pool = ThreadPool()
        _shared.set(pool)
    return pool

"""Runs a user's reward function with a deadline: in a worker thread, or if it is async, in an event loop of its own."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, Thread
from typing import Any
from weakref import ReferenceType, ref

import anyio
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import checkpoint

from gateway.await_user_code import await_user_code
from gateway.native.thread_pool import ThreadPool
from gateway.user_code import UserCode

LOOP_REPLY_S = 1.0
"""How long an event loop has to answer after a deadline has passed, before it counts as blocked."""
LOOP_CHECK_S = 5.0
"""How often an event loop checks whether its runner still exists."""


class DeadlineExceeded(Exception):
    """The function returned nothing in time."""


class FunctionRunner:
    """Calls one function. Its async calls share one event loop, the same from call to call, since what they open, such
    as an HTTP client, is bound to that loop; other functions and the run have loops of their own.

    A function that blocks its loop delays its other calls in that loop, which miss their deadlines too. Later calls get
    a new loop.
    """

    def __init__(self, function: Callable[..., Any], threads: ThreadPool) -> None:
        self._function, self._threads = function, threads
        self._lock = Lock()
        self._portal: BlockingPortal | None = None

    async def call(self, timeout_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result. Raises DeadlineExceeded, and whatever the function raises."""
        deadline = time.monotonic() + timeout_s
        with anyio.move_on_after(timeout_s):
            (result,) = await self._threads.run(self._call_in_thread, deadline, *args, **kwargs)
            return result
        await self._abandon_blocked_loop(min(LOOP_REPLY_S, timeout_s))
        raise DeadlineExceeded

    def uses(self, portal: BlockingPortal) -> bool:
        """Whether this is still the event loop for new calls."""
        with self._lock:
            return self._portal is portal

    def _call_in_thread(self, deadline: float, /, *args: Any, **kwargs: Any) -> tuple[Any]:
        with UserCode():
            value = self._function(*args, **kwargs)
        if not inspect.isawaitable(value):
            return (value,)
        try:
            return (self._get_portal().call(_await_until, value, deadline),)
        finally:
            if inspect.iscoroutine(value):  # The loop may have ended before it began.
                value.close()

    def _get_portal(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                started: Future[BlockingPortal] = Future()
                thread = Thread(target=anyio.run, args=(_run_loop, ref(self), started), name="rewards", daemon=True)
                thread.start()
                self._portal = started.result()
            return self._portal

    async def _abandon_blocked_loop(self, timeout_s: float) -> None:
        """Stops using an event loop that does not answer; it ends by itself once it is no longer blocked."""
        portal = self._portal
        if portal is None:
            return
        with anyio.move_on_after(timeout_s), suppress(RuntimeError):  # An abandoned loop may have ended by now.
            await self._threads.run(portal.call, checkpoint)
            return
        with self._lock:
            if self._portal is portal:
                self._portal = None


async def _await_until(value: Awaitable[Any], deadline: float) -> Any:
    """Awaits the value. Raises only an `Exception`, since any other would end the loop."""
    left_s = deadline - time.monotonic()
    if left_s <= 0 and inspect.iscoroutine(value):  # The loop was blocked, and the caller has given up.
        value.close()
        raise DeadlineExceeded
    with anyio.move_on_after(left_s):
        with UserCode():
            return await await_user_code(value)
    raise DeadlineExceeded


async def _run_loop(owner: ReferenceType[FunctionRunner], started: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        started.set_result(portal)
        while _is_in_use(owner, portal):  # noqa: ASYNC110 - a garbage-collected owner sets no event
            await anyio.sleep(LOOP_CHECK_S)


def _is_in_use(owner: ReferenceType[FunctionRunner], portal: BlockingPortal) -> bool:
    """In a function of its own, so that the loop keeps no reference to its owner, which nobody closes."""
    runner = owner()
    return runner is not None and runner.uses(portal)

"""A function of the user's own is asked in a worker thread, and what is async in an event loop beside the run's own."""

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

from gateway.native.thread import Threads

STILL_S = 1.0
"""After a deadline has passed, for a loop to show that it still turns."""
LOOK_S = 5.0
"""How often a loop looks whether it is still wanted."""


class Late(Exception):
    """Nothing came in time."""


class Apart:
    """One function. Async ones are many at once in one loop, the same from call to call, since what they open, such as
    a client, is bound to its loop; to another function's loop, or to the run's, it is a stranger.

    One that blocks its loop holds up those of this function that are in it: they pass their deadlines with it. Those
    that come later have another loop.
    """

    def __init__(self, function: Callable[..., Any], threads: Threads) -> None:
        self._function, self._threads = function, threads
        self._lock = Lock()
        self._portal: BlockingPortal | None = None

    async def ask(self, timeout_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """What it gives. Raises Late, and whatever the function raises."""
        until = time.monotonic() + timeout_s
        with anyio.move_on_after(timeout_s):
            (given,) = await self._threads.run(self._asked, until, *args, **kwargs)
            return given
        await self._look(min(STILL_S, timeout_s))
        raise Late

    def holds(self, portal: BlockingPortal) -> bool:
        with self._lock:
            return self._portal is portal

    def _asked(self, until: float, /, *args: Any, **kwargs: Any) -> tuple[Any]:
        value = self._function(*args, **kwargs)
        if not inspect.isawaitable(value):
            return (value,)
        given, ended = self._opened().call(_awaited, value, until)
        if ended is not None:
            raise ended
        return (given,)

    def _opened(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                opened: Future[BlockingPortal] = Future()
                thread = Thread(target=anyio.run, args=(_serve, ref(self), opened), name="rewards", daemon=True)
                thread.start()
                self._portal = opened.result()
            return self._portal

    async def _look(self, patience_s: float) -> None:
        """Leaves a loop that stands still; it ends once it turns again."""
        portal = self._portal
        if portal is None:
            return
        with anyio.move_on_after(patience_s), suppress(RuntimeError):  # One that was left before may have ended by now.
            await self._threads.run(portal.call, checkpoint)
            return
        with self._lock:
            if self._portal is portal:
                self._portal = None


async def _awaited(value: Awaitable[Any], until: float) -> tuple[Any, SystemExit | None]:
    """A script may end, and its loop shall not: that is handed on, and everything else is raised."""
    left_s = until - time.monotonic()
    if left_s <= 0 and inspect.iscoroutine(value):  # The loop stood still, and nobody waits for this any more.
        value.close()
        raise Late
    with anyio.move_on_after(left_s):
        try:
            return await value, None
        except SystemExit as error:
            return None, error
    raise Late


async def _serve(owner: ReferenceType[Apart], opened: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        opened.set_result(portal)
        while _wanted(owner, portal):  # noqa: ASYNC110 - whoever lets go of it does so without a word
            await anyio.sleep(LOOK_S)


def _wanted(owner: ReferenceType[Apart], portal: BlockingPortal) -> bool:
    """No reference to the owner outlives this: whoever is done with it does not close it."""
    one = owner()
    return one is not None and one.holds(portal)

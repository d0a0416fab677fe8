"""Waits for what has no event: another process, thread or event loop; and clocks that a busy machine does not turn."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio
import psutil

PATIENCE_S = 60.0
"""Limit on what should simply work. It is no measurement: a machine may stand still for seconds at any place."""
TICK_S = 0.01


async def wait_until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Polls until the condition holds. The limit is far above what is needed: tests also run on busy machines."""
    with anyio.fail_after(within_s):
        while not holds():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that nobody waited for may stay as a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Clock:
    """Seconds in ticks of at most twice their length: it stands while what ticks it does."""

    now_s: float = 0.0
    _before: float = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        self.now_s += min(now - self._before, 2 * TICK_S) if self._before else 0.0
        self._before = now


@contextmanager
def process_clock() -> Iterator[Clock]:
    """A clock that stands while this process does; it goes on while its event loop waits or is held."""
    clock, done = Clock(), threading.Event()

    def run() -> None:
        while not done.wait(TICK_S):
            clock.tick()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield clock
    finally:
        done.set()
        thread.join()


@asynccontextmanager
async def loop_clock() -> AsyncIterator[Clock]:
    """A clock that stands while the event loop does: it measures what the loop waited for, not how busy it was."""
    clock = Clock()

    async def run() -> None:
        while True:
            clock.tick()
            await anyio.sleep(TICK_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield clock
        tasks.cancel_scope.cancel()

"""The watchdog of the event loop: what it counts, and where it is shown."""

from __future__ import annotations

import time

import anyio

from gateway.loop_watchdog import LoopWatchdog
from tests.waiting import PATIENCE_S


async def test_held_loop_is_measured() -> None:
    watchdog = LoopWatchdog(interval_s=0.001)
    noticed = anyio.Event()
    watchdog.listeners.append(lambda held_s: noticed.set() if held_s > 0.1 else None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watchdog.run)
        await anyio.wait_all_tasks_blocked()
        time.sleep(0.2)  # noqa: ASYNC251 - what the watchdog is for
        with anyio.fail_after(PATIENCE_S):
            await noticed.wait()
        tasks.cancel_scope.cancel()
    assert watchdog.longest_own_s < 0.1, "sleeping is no computing"
    assert watchdog.count >= 1 and 0.1 < watchdog.longest_s <= watchdog.total_s

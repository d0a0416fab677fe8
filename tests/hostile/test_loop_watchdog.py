"""The watchdog of the event loop: what it counts, and where it is shown."""

from __future__ import annotations

import time

import anyio

from gateway.gateway import Gateway
from gateway.loop_watchdog import LoopWatchdog
from tests.http.api_client import ApiClient
from tests.http.test_http_metrics import read_metrics
from tests.live_server import live_server_async
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


async def test_computing_of_the_loop_and_of_threads_is_told_apart() -> None:
    watchdog = LoopWatchdog()
    watchdog.record(0.5, 0.01, 0.3)
    watchdog.record(0.2, 0.4, 0.4)
    assert (watchdog.longest_s, watchdog.longest_own_s, watchdog.longest_process_s) == (0.5, 0.2, 0.3)


def test_longest_time_is_that_since_it_was_last_taken() -> None:
    watchdog = LoopWatchdog()
    for held_s in (0.001, 0.2, 0.1):
        watchdog.record(held_s)
    assert watchdog.count == 2
    assert watchdog.take_longest() == 0.2
    watchdog.record(0.1)
    assert (watchdog.take_longest(), watchdog.take_longest(), watchdog.longest_s) == (0.1, 0.0, 0.2)


async def test_held_loop_is_a_metric_of_the_gateway() -> None:
    async with live_server_async(lambda: Gateway([])) as server:
        server.gateway.loop_watchdog.record(0.3)
        values = read_metrics((await ApiClient(server.url)("GET", "/metrics")).text)
    assert values["mtrl_loop_blocked_seconds_count",] >= 1
    assert values["mtrl_loop_blocked_seconds_sum",] >= 0.3

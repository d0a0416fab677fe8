"""Tests of the thread pool: abandoned threads keep their slots."""

from __future__ import annotations

import asyncio
import threading

import anyio
import anyio.lowlevel

from gateway.native.thread_pool import ThreadPool


async def test_an_abandoned_thread_keeps_its_slot_until_it_ends() -> None:
    threads = ThreadPool(max_threads=1)
    started, finish = threading.Event(), threading.Event()

    def wait_for_finish() -> None:
        started.set()
        finish.wait(10)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, wait_for_finish)
            await anyio.to_thread.run_sync(started.wait, 5)
            tasks.cancel_scope.cancel()
        assert threads._slots.value == 0
        with anyio.move_on_after(0.05) as waiting:
            await threads.run(wait_for_finish)
        assert waiting.cancelled_caught, "there is no free slot"
        finish.set()
        assert await threads.run(lambda: "free again") == "free again"
    assert threads._slots.value == 1


async def test_a_call_that_never_started_frees_its_slot() -> None:
    threads = ThreadPool(max_threads=1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await threads.run(lambda: None)
    assert threads._slots.value == 1


def test_a_thread_that_ends_after_its_loop_stopped_waits_for_nobody() -> None:
    threads = list[threading.Thread]()
    finish = threading.Event()

    def wait_for_finish() -> None:
        threads.append(threading.current_thread())
        finish.wait(60)

    async def abandon() -> None:
        pool = ThreadPool()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run, wait_for_finish)
            while not threads:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    finish.set()
    threads[0].join(60)
    has_ended = not threads[0].is_alive()
    loop.run_until_complete(anyio.lowlevel.checkpoint())
    loop.close()
    assert has_ended, "it waits for a loop that runs no more"

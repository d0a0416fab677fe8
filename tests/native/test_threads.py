"""Threads that never return keep their places, so that they cannot pile up."""

from __future__ import annotations

import threading

import anyio

from gateway.native.thread import Threads


async def test_a_thread_that_is_given_up_keeps_its_place_until_it_ends() -> None:
    threads = Threads(most=1)
    began, go_on = threading.Event(), threading.Event()

    def stuck() -> None:
        began.set()
        go_on.wait(10)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(threads.run, stuck)
            await anyio.to_thread.run_sync(began.wait, 5)
            tasks.cancel_scope.cancel()
        assert threads.free == 0
        with anyio.move_on_after(0.05) as waiting:
            await threads.run(stuck)
        assert waiting.cancelled_caught, "there is no place for a second one"
        go_on.set()
        assert await threads.run(lambda: "free again") == "free again"
    assert threads.free == 1


async def test_work_that_never_began_gives_its_place_back_at_once() -> None:
    threads = Threads(most=1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await threads.run(lambda: None)
    assert threads.free == 1

"""Synchronous functions run on the thread that trains, one after the other, with deadlines."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mtrl_plugins.trl.caller_thread import CallerThread


def run(main: Callable[[CallerThread], Any]) -> Any:
    """What `main` returns, run by a caller's thread that it gets."""
    caller = CallerThread()
    return caller.run(partial(main, caller))


def test_functions_run_in_the_main_thread_where_they_may_set_alarms() -> None:
    def with_alarm(seconds: int) -> str:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(seconds)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return threading.current_thread().name

    async def main(caller: CallerThread) -> tuple[str, str]:
        own = threading.current_thread().name
        return await to_thread.run_sync(caller.call, with_alarm, 30.0, 5), own

    assert run(main) == ("MainThread", "training")


def test_functions_run_one_after_the_other_and_the_queue_does_not_count() -> None:
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.02)
        running -= 1

    async def main(caller: CallerThread) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(to_thread.run_sync, caller.call, work, 0.3)

    run(main)
    assert most == 1


def test_errors_of_functions_and_of_training_are_passed_on() -> None:
    async def main(caller: CallerThread) -> None:
        with pytest.raises(KeyError, match="no pear"):
            await to_thread.run_sync(caller.call, {}.__getitem__, 30.0, "no pear")
        raise LookupError("training failed")

    with pytest.raises(LookupError, match="training failed"):
        run(main)


def test_a_function_may_call_back_from_the_same_thread() -> None:
    async def main(caller: CallerThread) -> int:
        return int(await to_thread.run_sync(caller.call, lambda: caller.call(int, 1.0, "3"), 30.0))

    assert run(main) == 3

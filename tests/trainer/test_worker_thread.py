"""The worker thread: one thread for all calls, cancellation and exceptions."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest

from trainer.worker_thread import WorkerThread


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    with WorkerThread("mine") as thread:
        yield thread


async def test_cancelled_caller_leaves_when_its_call_ends(thread: WorkerThread) -> None:
    begun, go_on, over = anyio.Event(), threading.Event(), threading.Event()
    token = anyio.lowlevel.current_token()

    def act() -> None:
        anyio.from_thread.run_sync(begun.set, token=token)
        assert go_on.wait(10)
        over.set()

    left_early = False
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                nonlocal left_early
                try:
                    await thread.run(act)
                finally:
                    left_early = not over.is_set()

            tasks.start_soon(ask)
            await begun.wait()
            tasks.cancel_scope.cancel()
            go_on.set()
    assert over.is_set() and not left_early

"""The worker thread: one thread for all calls, cancellation and exceptions."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from trainer.worker_thread import WorkerThread

ROOT = Path(__file__).parents[2]


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    with WorkerThread("mine") as thread:
        yield thread


async def test_concurrent_calls_run_on_one_thread_in_order(thread: WorkerThread) -> None:
    calls: list[tuple[int, int]] = []
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(thread.run, lambda number=number: calls.append((number, threading.get_ident())))
    assert [number for number, _ in calls] == [*range(10)] and len({ident for _, ident in calls}) == 1


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


INTERRUPTED = """
import os, signal
import anyio
from trainer.worker_thread import WorkerThread

def act():
    os.kill(os.getpid(), signal.SIGINT)
    print("told", flush=True)
    signal.sigtimedwait([], 0.2)  # the interrupt is handled while it runs
    print("over", flush=True)

async def main():
    with WorkerThread("mine") as thread:
        await thread.run(act)

try:
    anyio.run(main)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_during_a_call_ends_the_program_after_it() -> None:
    """On asyncio, where training runs, and which cancels the main task as no scope does."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.split() == ["told", "over", "interrupted"], done.stderr

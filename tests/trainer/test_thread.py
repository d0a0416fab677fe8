"""A thread that stays the same one, and whom it keeps waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import anyio
import pytest

from trainer.thread import OwnThread

ROOT = Path(__file__).parents[2]
WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def thread() -> Iterator[OwnThread]:
    with OwnThread("mine") as thread:
        yield thread


async def test_whatever_runs_there_runs_in_one_thread_which_is_not_the_loops(thread: OwnThread) -> None:
    with anyio.fail_after(10):
        ran = {await thread.run(threading.get_ident) for _ in range(20)}
    assert len(ran) == 1 and threading.get_ident() not in ran


async def test_two_who_come_at_once_are_served_one_after_the_other_and_get_their_own(thread: OwnThread) -> None:
    inside, most, results = 0, 0, {}

    def act(number: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1
        return number * number

    async def ask(number: int) -> None:
        results[number] = await thread.run(lambda: act(number))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(ask, number)
    assert most == 1 and results == {number: number * number for number in range(10)}


async def test_what_it_raises_is_raised_to_whoever_asked_and_the_next_is_served(thread: OwnThread) -> None:
    with anyio.fail_after(10):
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        assert await thread.run(lambda: 7) == 7


async def test_it_sees_the_context_of_whoever_asks(thread: OwnThread) -> None:
    WHOSE.set("mine")
    with anyio.fail_after(10):
        assert await thread.run(WHOSE.get) == "mine"


async def test_one_who_is_cancelled_while_it_runs_leaves_when_it_is_over(thread: OwnThread) -> None:
    begun, go_on, over = anyio.Event(), threading.Event(), threading.Event()
    token = anyio.lowlevel.current_token()

    def act() -> None:
        anyio.from_thread.run_sync(begun.set, token=token)
        assert go_on.wait(10)
        over.set()

    left_early = False
    with anyio.fail_after(10):
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
from trainer.thread import OwnThread

def act():
    os.kill(os.getpid(), signal.SIGINT)
    print("told", flush=True)
    signal.sigtimedwait([], 0.2)  # the interrupt is handled while it runs
    print("over", flush=True)

async def main():
    with OwnThread("mine") as thread:
        await thread.run(act)

try:
    anyio.run(main)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_it_runs_ends_the_program_when_it_is_over() -> None:
    """On asyncio, where training runs, and which cancels the main task as no scope does."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.split() == ["told", "over", "interrupted"], done.stderr


async def test_one_who_was_cancelled_before_does_not_begin(thread: OwnThread) -> None:
    ran = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await thread.run(lambda: ran.append(1))
    assert scope.cancelled_caught
    with anyio.fail_after(10):
        await thread.run(lambda: None)
    assert ran == []


async def test_its_thread_ends_with_it() -> None:
    with OwnThread("brief") as thread, anyio.fail_after(10):
        await thread.run(lambda: None)
        assert any(one.name.startswith("brief") for one in threading.enumerate())
    assert not any(one.name.startswith("brief") for one in threading.enumerate())

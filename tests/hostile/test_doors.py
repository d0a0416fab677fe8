"""User code that raises anything, returns anything or never returns costs its own call only."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from gateway.feedback import conversation
from gateway.mcp_client import mcp_session
from gateway.native import native_toolset
from mtrl_plugins.environments import episodes
from mtrl_plugins.swift import schedulers
from mtrl_plugins.trl.caller_thread import CallerThread
from tests.hostile.doors import DOORS, open_door
from tests.hostile.gateway_doors import PATIENCE
from tests.waiting import wait_until


class Panic(BaseException):
    """A panic of a library, which is no `Exception`."""


class Unprintable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class Spiteful:
    """A value of which nothing can be read."""

    def _refuse(self, *_: Any) -> Any:
        raise Panic("it is spiteful")

    __repr__ = __str__ = __float__ = __bool__ = __len__ = __iter__ = __eq__ = __getitem__ = __contains__ = _refuse
    __hash__ = None  # type: ignore[assignment]


RAISED = (
    KeyboardInterrupt("k"),
    SystemExit(3),
    GeneratorExit("g"),
    Panic("p"),
    asyncio.CancelledError("c"),
    Unprintable(),
    StopIteration("s"),
    BaseExceptionGroup("both", [KeyboardInterrupt("k"), Panic("p")]),
)


def raises(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


async def fine_calls(name: str, done: anyio.Event) -> None:
    """Calls the same door with code that does as it should, until the test is done."""
    while not done.is_set():
        assert await open_door(name, lambda: "fine") == "ok"
        await anyio.lowlevel.checkpoint()


async def knock(name: str, act: Callable[[], Any]) -> str:
    """What a door tells of one call, beside healthy calls of the same door."""
    done = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fine_calls, name, done)
        told = await open_door(name, act)
        done.set()
    return told


@pytest.mark.parametrize("name", DOORS)
async def test_code_that_raises_anything_costs_its_own_call(name: str) -> None:
    for error in RAISED:
        told = await knock(name, raises(error))
        if DOORS[name].is_silent:
            assert told == "ok", error
            continue
        kinds = [type(inner).__name__ for inner in getattr(error, "exceptions", [error])]
        assert told != "ok" and any(kind in told for kind in (*kinds, type(error).__name__)), told


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if not door.ignores_value])
async def test_code_that_returns_anything_costs_its_own_call(name: str) -> None:
    for value in (Spiteful(), [Spiteful()], {"a": Spiteful()}, (Spiteful(), Spiteful()), b"\xff", 10**5000, object()):
        assert isinstance(await knock(name, lambda value=value: value), str)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    released = threading.Event()
    yield released
    released.set()


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PATIENCE, "s", 0.3)
    for constant in ("CREATE_TIMEOUT_S", "FINISH_TIMEOUT_S"):
        monkeypatch.setattr(native_toolset, constant, PATIENCE.s)
    monkeypatch.setattr(conversation, "CLOSE_TIMEOUT_S", PATIENCE.s)
    monkeypatch.setattr(mcp_session, "PARSE_TIMEOUT_S", PATIENCE.s)
    monkeypatch.setattr(episodes, "CLOSE_S", PATIENCE.s)
    monkeypatch.setattr(schedulers, "CLOSE_TIMEOUT_S", 4 * PATIENCE.s)  # Longer than a rollout may last.


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.has_deadline])
async def test_code_that_never_returns_is_given_up_at_its_deadline(
    name: str, release: threading.Event, short_deadlines: None
) -> None:
    told = await open_door(name, lambda: release.wait(60))
    assert told != "ok"
    release.set()


async def wait_stubbornly(cancellations: float) -> None:
    """Waits for ever, and goes on waiting after so many cancellations."""
    while cancellations > 0:
        cancellations -= 1
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
    await anyio.sleep_forever()


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.is_async])
async def test_async_code_that_ignores_its_cancellation_is_closed(
    name: str, short_deadlines: None, caplog: pytest.LogCaptureFixture
) -> None:
    is_closed = not DOORS[name].is_generator
    told = await open_door(name, partial(wait_stubbornly, math.inf if is_closed else 3))
    assert DOORS[name].is_silent or told != "ok"
    if is_closed:  # Rewards run in a loop of their own, which nobody waits for.
        await wait_until(lambda: "after 100 cancellations; it was closed" in caplog.text)


INTERRUPTED = """
import os, signal, sys, threading
import anyio
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.types import Task, ToolCall

def tool():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Event().wait(20)

async def async_tool():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    await anyio.sleep(20)

async def main():
    toolset = NativeToolset([FunctionTool(tool), FunctionTool(async_tool)])
    async with toolset, toolset.open(Task("t")) as session:
        await session.call(ToolCall("1", sys.argv[1], "{}"))
    print("the call ended", flush=True)

try:
    anyio.run(main)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("tool", ["tool", "async_tool"])
def test_ctrl_c_ends_a_program_while_user_code_runs(tool: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, tool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "interrupted\n", done.stderr


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_the_thread_that_called_train_survives_what_its_functions_raise(error: BaseException) -> None:
    async def main(caller: CallerThread) -> str:
        try:
            await anyio.to_thread.run_sync(caller.call, raises(error), 20.0)
        except Exception as problem:
            kind = type(problem).__name__
            return str(await anyio.to_thread.run_sync(caller.call, lambda: kind, 20.0))
        return "nothing was raised"

    caller = CallerThread()
    told = caller.run(partial(main, caller))
    assert told in (type(error).__name__, "UserCodeError", "RuntimeError")

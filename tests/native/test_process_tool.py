"""Tests of tools with `run_in: process`: they have a main thread, and end with their deadline."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from gateway import Gateway, Outcome, Task, ToolCall, ToolResult
from gateway.errors import ConfigError
from gateway.native.process_pool import ProcessPool
from tests.conftest import Write
from tests.waiting import is_alive, wait_until

HANG_TIMEOUT_S = 6
"""Includes the start of a process on a busy machine."""
TOOLS = """
    import os, signal, subprocess, time
    from gateway.native.function import SessionContext

    def with_alarm(text: str = "") -> str:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        signal.alarm(0)
        print("printed, not sent")
        return f"{text}{os.getpid()}"

    async def waits(seconds: float) -> dict:
        import anyio
        await anyio.sleep(seconds)
        return {"waited": seconds}

    def hangs(file: str) -> str:
        started = subprocess.Popen(["sleep", "600"])
        with open(file + ".new", "w") as target:
            target.write(str(started.pid))
        os.rename(file + ".new", file)
        time.sleep(600)

    def dies() -> str:
        os._exit(3)

    def fails() -> str:
        raise KeyError("no such pear")

    def in_context(context: SessionContext) -> str:
        return ""
"""


async def call(file: Path, *calls: tuple[str, str]) -> list[ToolResult]:
    """The results of calls, one after the other in one session."""
    async with Gateway.load(file, None) as gateway, gateway.open(Task()) as session:
        return [(await session.calls([ToolCall("1", name, arguments)]))[0] for name, arguments in calls]


@pytest.fixture
def tools(write: Write) -> Path:
    write("own_tools.py", TOOLS)
    entry = "  - {{function: 'own_tools:{}', run_in: process, timeout_s: {}}}\n"
    lines = [entry.format(name, 30) for name in ("with_alarm", "waits", "dies", "fails")]
    return write("tools.yaml", "tools:\n" + "".join([*lines, entry.format("hangs", HANG_TIMEOUT_S)]))


async def test_a_tool_in_a_process_may_set_an_alarm_and_keeps_its_process(tools: Path) -> None:
    first, second = await call(tools, ("with_alarm", "{}"), ("with_alarm", "{}"))
    assert first.outcome is second.outcome is Outcome.OK
    assert first.text == second.text != str(os.getpid())
    await wait_until(lambda: not is_alive(int(first.text)))


async def test_async_functions_and_errors_give_the_results_that_they_give_in_threads(tools: Path) -> None:
    more = (("waits", "{}"), ("dies", "{}"), ("dies", "{}"))
    waited, failed, invalid, *died = await call(tools, ("waits", '{"seconds": 0.01}'), ("fails", "{}"), *more)
    assert waited.structured == {"waited": 0.01}
    assert failed.outcome is Outcome.ERROR and "no such pear" in failed.text
    assert invalid.outcome is Outcome.INVALID
    for result in died:  # The first one's process is replaced.
        assert result.outcome is Outcome.UNKNOWN and "ended during a call" in str(result.reason)


async def test_a_deadline_ends_the_process_with_all_that_it_started(tools: Path, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    (result,) = await call(tools, ("hangs", f'{{"file": "{file}"}}'))
    assert result.outcome is Outcome.TIMEOUT
    await wait_until(lambda: not is_alive(int(file.read_text())))


async def test_a_cancelled_call_ends_its_process(write: Write, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    write("own_tools.py", TOOLS)
    tools = write("tools.yaml", "tools: [{function: 'own_tools:hangs', run_in: process, timeout_s: 600}]")
    async with Gateway.load(tools, None) as gateway, gateway.open(Task()) as session:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.calls, [ToolCall("1", "hangs", f'{{"file": "{file}"}}')])
            await wait_until(file.exists)
            tasks.cancel_scope.cancel()
        await wait_until(lambda: not is_alive(int(file.read_text())))


async def test_a_function_that_needs_the_context_cannot_run_in_a_process(write: Write) -> None:
    write("own_tools.py", TOOLS)
    file = write("tools.yaml", "tools: [{function: 'own_tools:in_context', run_in: process}]")
    with pytest.raises(ConfigError, match="run_in"):
        Gateway.load(file, None)


async def test_calls_wait_for_a_free_process(tools: Path) -> None:
    from gateway.native.function import FunctionPath

    pool = ProcessPool(FunctionPath("own_tools:with_alarm", tools), "with_alarm", max_processes=1)
    texts: list[str] = []

    async def once() -> None:
        texts.append((await pool.call({})).text)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(once)
    await pool.close()
    assert len(texts) == 3 and len({*texts}) == 1

"""Injects misbehaviour into a gateway beside healthy callers, and reports what those saw meanwhile.

A row of a table is a trick: what misbehaves, over which transport, and what its own caller must get. The healthy
callers are the same for every trick: a native tool of the same gateway, called all the time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.http.uvicorn_server import collect_garbage_seldom
from gateway.limits import LimitedToolset
from gateway.loop_watchdog import LoopWatchdog
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.toolset import ToolsetWrapper
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.mcp_client.mcp_toolsets import open_toolset
from tests.servers.start_server import serve_script
from tests.waiting import Clock, loop_clock, process_clock

HELD_S = 0.05
"""The promise: the longest time for which the event loop's thread may compute. Processor time is measured, which does
not grow while the machine is busy with other things."""
INTERPRETER_S = 0.15
"""Bound on how long threads may hold the interpreter while the event loop waits, in processor time of the process."""
REFERENCE_S = 0.004
"""Processor time of `measure_slowness` on the core that the promise was made for."""
MOST_SLOWNESS = 4.0
SLOWEST_S = 5.0
"""Bound on a healthy call, by a clock that stands while the process does."""
PATIENCE_S = 60.0
"""A test that takes longer hangs."""


async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def measure_slowness() -> float:
    """How many times longer a fixed computation takes here and now than on the core of the promise: a slow core, or one
    that is shared with a busy sibling, takes more processor time for the same."""
    began = time.thread_time()
    for _ in range(5):
        sum(number * number for number in range(100_000))
    return min(MOST_SLOWNESS, max(1.0, (time.thread_time() - began) / (5 * REFERENCE_S)))


@dataclass
class Meanwhile:
    """What healthy callers saw while something misbehaved."""

    watchdog: LoopWatchdog
    clock: Clock
    """Stands while the event loop does."""
    results: list[ToolResult] = field(default_factory=list)
    slowest_s: float = 0.0
    slowness: float = field(default_factory=measure_slowness)
    """Of the core before anything was called."""

    def assert_undisturbed(self) -> None:
        """Fails unless every healthy call was answered, and the event loop was never held for long."""
        assert self.results, "no healthy call ended meanwhile"
        assert {result.outcome for result in self.results} == {Outcome.OK}
        assert self.slowest_s < SLOWEST_S
        assert_not_held(self.watchdog, self.slowness)


def assert_not_held(watchdog: LoopWatchdog, slowness_before: float = 1.0) -> None:
    """Fails if the event loop's thread, or threads that hold the interpreter, kept others waiting."""
    slowness = max(slowness_before, measure_slowness())
    words = f"on a core that is {slowness:.1f} times slower than that of the promise"
    own_s, process_s = watchdog.longest_own_s, watchdog.longest_process_s
    assert own_s <= HELD_S * slowness, f"the event loop computed for {own_s:.3f} s {words}"
    assert process_s <= INTERPRETER_S * slowness, f"threads held it for {process_s:.3f} s {words}"


@asynccontextmanager
async def healthy_calls(gateway: Gateway) -> AsyncIterator[Meanwhile]:
    """Calls a healthy tool of the gateway during the block, over and over."""
    collect_garbage_seldom()

    async def call_on() -> None:
        async with gateway.open(Task(tools=("add",))) as session:
            while True:
                started_s = process.now_s
                meanwhile.results.append(await session.call(ToolCall("1", "add", '{"a": 1, "b": 2}')))
                meanwhile.slowest_s = max(meanwhile.slowest_s, process.now_s - started_s)
                await anyio.sleep(0.002)

    with process_clock() as process:
        async with loop_clock() as clock, anyio.create_task_group() as tasks:
            meanwhile = Meanwhile(LoopWatchdog(interval_s=0.005), clock)
            tasks.start_soon(meanwhile.watchdog.run)
            tasks.start_soon(call_on)
            await anyio.wait_all_tasks_blocked()
            yield meanwhile
            tasks.cancel_scope.cancel()


class Entered(ToolsetWrapper):
    """A toolset that its test has entered, and leaves, itself."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


@asynccontextmanager
async def gateway_beside(*sources: Source) -> AsyncIterator[Gateway]:
    """A gateway with a healthy tool `add` and the given sources; fails the test if it hangs."""
    healthy = Source("healthy", NativeToolset([FunctionTool(add)]))
    with anyio.fail_after(PATIENCE_S):
        async with Gateway([healthy, *sources]) as gateway:
            yield gateway


async def call_beside(
    sources: Sequence[Source], tool: str, arguments: dict[str, Any] | str
) -> tuple[ToolResult, Meanwhile]:
    """The result of one call of a misbehaving tool, and what healthy callers saw meanwhile."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    async with gateway_beside(*sources) as gateway, gateway.open() as session, healthy_calls(gateway) as meanwhile:
        return await session.call(ToolCall("1", tool, text)), meanwhile


ANSWERING = Path(__file__).with_name("answering_server.py")


@asynccontextmanager
async def answering_toolset(transport: str, **config: Any) -> AsyncIterator[McpToolset]:
    """The server of `answering_server.py` as a toolset, over one transport."""
    if transport == "stdio":
        async with open_toolset(Server(command=sys.executable, args=(str(ANSWERING), "stdio"), **config)) as toolset:
            yield toolset
        return
    async with (
        serve_script(ANSWERING, transport) as url,
        open_toolset(Server(url=url, transport="streamable-http", **config)) as toolset,
    ):
        yield toolset


async def call_answering(transport: str, trick: str, timeout_s: float, **config: Any) -> tuple[ToolResult, Meanwhile]:
    """The result of a call that the server answers with a trick, under a deadline; the server stays usable after it."""
    async with answering_toolset(transport, **config) as toolset:
        limited = LimitedToolset(Entered(toolset), Limits(timeout_s=timeout_s))
        return await call_beside([Source("hostile", limited)], trick, {})

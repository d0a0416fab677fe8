"""Compares how long calls of a healthy server take during a flood and without it, on a machine that may be busy.

Both are measured in turn, several times. Meanwhile without the flood, another process computes as much as the flooding
server does. A machine that is busy with other things makes single rounds slower, but never all of them faster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import quantiles

import anyio

from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Outcome
from tests.mcp_client.mcp_toolsets import call_tool

CALLS = 40
"""Calls of one window."""
ROUNDS = 6
FACTOR = 2.0
"""The promise: by how much slower the 95th percentile may be while a flood lasts."""
SLICE_S = 0.02
"""A few slices of a busy machine's scheduler, which are longer than an undisturbed call."""


async def measure_p95(healthy: McpToolset) -> float:
    """The 95th percentile of the seconds that calls take, one after the other."""
    seconds: list[float] = []
    for _ in range(CALLS):
        start = anyio.current_time()
        assert (await call_tool(healthy, "echo", text="hi")).outcome is Outcome.OK
        seconds.append(anyio.current_time() - start)
    return quantiles(seconds, n=20)[-1]


@contextmanager
def innocent_load() -> Iterator[None]:
    """A process that computes during the block."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            yield
        finally:
            os.kill(child.pid, signal.SIGKILL)


async def assert_calls_go_on(healthy: McpToolset, flood: Callable[[], Awaitable[object]]) -> None:
    """Fails unless calls take at most twice as long while `flood` runs again and again, in the best round."""
    rounds: list[tuple[float, float]] = []
    await measure_p95(healthy)
    while len(rounds) < ROUNDS:
        with innocent_load():
            without = await measure_p95(healthy)
        async with anyio.create_task_group() as tasks:

            async def flood_on() -> None:
                while True:
                    await flood()

            tasks.start_soon(flood_on)
            during = await measure_p95(healthy)
            tasks.cancel_scope.cancel()
        rounds.append((without, during))
        if during <= FACTOR * without + SLICE_S:
            return
    raise AssertionError(f"healthy calls took more than {FACTOR} times as long in each round: {rounds}")

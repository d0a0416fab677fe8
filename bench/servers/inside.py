"""Calls made in the process that wants their answers: our gateway as a library, and the bare `mcp` client.

Reads orders from standard input, one JSON object a line, and answers each with what it measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio import to_thread
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from gateway.gateway import Gateway
from gateway.types import ToolCall

HERE = Path(__file__).parent
URL = os.environ["ECHO_URL"]
Way = Callable[[str], Awaitable[str]]
"""Says a token, and gives back what it hears."""


def _ours(gateway: Gateway, tool: str) -> Callable[[], Any]:
    @asynccontextmanager
    async def way() -> AsyncIterator[Way]:
        async with gateway.open() as session:

            async def say(token: str) -> str:
                return (await session.call(ToolCall(token, tool, f'{{"token": "{token}"}}'))).text

            yield say

    return way


async def _say(client: Client, token: str) -> str:
    result = await client.call_tool("echo", {"token": token})
    return str(getattr(result.content[0], "text", ""))


def _raw(target: Callable[[], Any]) -> Callable[[], Any]:
    @asynccontextmanager
    async def way() -> AsyncIterator[Way]:
        async with Client(target()) as client:
            yield lambda token: _say(client, token)

    return way


@asynccontextmanager
async def _anew() -> AsyncIterator[Way]:
    """A session opened for each call, over an HTTP client that is not."""
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=256)) as http:

        async def say(token: str) -> str:
            async with Client(streamable_http_client(URL, http_client=http)) as client:
                return await _say(client, token)

        yield say


RAW: dict[str, Callable[[], Any]] = {
    "raw-stdio": _raw(lambda: StdioServerParameters(command=sys.executable, args=[str(HERE / "echo.py")])),
    "raw-http": _raw(lambda: URL),
    "anew-http": _anew,
}


async def measure(say: Way, calls: int, concurrency: int) -> dict[str, float]:
    """`concurrency` workers share `calls` calls; right is what came back as it was sent."""
    numbers, right = count(), 0

    async def work() -> None:
        nonlocal right
        while (number := next(numbers)) < calls:
            token = f"{number:012x}"
            heard = await say(token)
            right += heard == token

    wall, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(work)
    return {"right": right, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


async def main() -> None:
    ways: dict[str, Way] = {}
    async with AsyncExitStack() as stack:
        known = dict(RAW)
        if sys.argv[1] == "ours":
            config = HERE / "config"
            gateway = await stack.enter_async_context(Gateway.load(config, config / "mcp_servers.json"))
            known = {spec.name: _ours(gateway, spec.name) for spec in gateway.specs}
        print("ready", flush=True)
        while line := await to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            name = order["way"]
            if name not in ways:
                ways[name] = await stack.enter_async_context(known[name]())
            measured = await measure(ways[name], order["calls"], order["concurrency"])
            print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    anyio.run(main)

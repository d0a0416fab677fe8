"""Measures calls made in this process: through the gateway as a library, and through the plain `mcp` client.

Reads orders from standard input, one JSON object a line, and answers each with its measurement.
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
Caller = Callable[[str], Awaitable[str]]
"""Calls the tool with a token, and returns its answer."""


def _gateway_caller(gateway: Gateway, tool: str) -> Callable[[], Any]:
    @asynccontextmanager
    async def open_caller() -> AsyncIterator[Caller]:
        async with gateway.open() as session:

            async def call(token: str) -> str:
                return (await session.call(ToolCall(token, tool, f'{{"token": "{token}"}}'))).text

            yield call

    return open_caller


async def _call(client: Client, token: str) -> str:
    result = await client.call_tool("echo", {"token": token})
    return str(getattr(result.content[0], "text", ""))


def _mcp_caller(target: Callable[[], Any]) -> Callable[[], Any]:
    @asynccontextmanager
    async def open_caller() -> AsyncIterator[Caller]:
        async with Client(target()) as client:
            yield lambda token: _call(client, token)

    return open_caller


@asynccontextmanager
async def _new_session_caller() -> AsyncIterator[Caller]:
    """Opens an MCP session for each call, over one HTTP client."""
    async with httpx2.AsyncClient(limits=httpx2.Limits(max_connections=256)) as http:

        async def call(token: str) -> str:
            async with Client(streamable_http_client(URL, http_client=http)) as client:
                return await _call(client, token)

        yield call


MCP_CALLERS: dict[str, Callable[[], Any]] = {
    "raw-stdio": _mcp_caller(
        lambda: StdioServerParameters(command=sys.executable, args=[str(HERE / "plain_stdio.py")])
    ),
    "raw-http": _mcp_caller(lambda: URL),
    "anew-http": _new_session_caller,
}


async def measure(call: Caller, calls: int, concurrency: int) -> dict[str, float]:
    """Runs the calls with concurrent workers; a call is right if its token comes back."""
    numbers, right = count(), 0

    async def work() -> None:
        nonlocal right
        while (number := next(numbers)) < calls:
            token = f"{number:012x}"
            answer = await call(token)
            right += answer == token

    wall, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(concurrency):
            tasks.start_soon(work)
    return {"right": right, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


async def main() -> None:
    callers: dict[str, Caller] = {}
    async with AsyncExitStack() as stack:
        factories = dict(MCP_CALLERS)
        if sys.argv[1] == "ours":
            config = HERE / "config"
            gateway = await stack.enter_async_context(Gateway.load(config, config / "mcp_servers.json"))
            factories = {spec.name: _gateway_caller(gateway, spec.name) for spec in gateway.specs}
        print("ready", flush=True)
        while line := await to_thread.run_sync(sys.stdin.readline):
            order = json.loads(line)
            name = order["way"]
            if name not in callers:
                callers[name] = await stack.enter_async_context(factories[name]())
            result = await measure(callers[name], order["calls"], order["concurrency"])
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})

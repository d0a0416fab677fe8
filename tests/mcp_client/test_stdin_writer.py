"""Lines to a stdio server: whole and in order, however slowly it reads, until it is gone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from types import coroutine
from typing import Any

import anyio
from mcp_types import JSONRPCRequest

from gateway.mcp_client.child_process import OpenRequests, StdinWriter
from gateway.mcp_client.messages import parse_messages
from gateway.process.pipe_process import ReadPipe, WritePipe

COUNT = 300
"""Of a kilobyte each: more than the queue and the pipe hold."""


@contextmanager
def pipe() -> Iterator[tuple[ReadPipe, WritePipe]]:
    read, write = os.pipe()
    ends = ReadPipe(os.fdopen(read, "rb", buffering=0)), WritePipe(os.fdopen(write, "wb", buffering=0))
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def request(number: int) -> JSONRPCRequest:
    return JSONRPCRequest(jsonrpc="2.0", id=number, method="tools/call", params={"text": "x" * 1000})


@coroutine
def count_waits(code: Coroutine[Any, Any, None], waits: Counter[int], number: int) -> Generator[Any, Any, None]:
    """Awaits code that is not cancelled, and counts how often it waits."""
    for waited in code.__await__():
        waits[number] += 1
        yield waited


async def test_a_server_that_reads_late_gets_lines_whole_and_in_order_and_each_caller_waits_once() -> None:
    writer, waits, received = StdinWriter(OpenRequests()), Counter[int](), b""

    async def send(number: int) -> None:
        await count_waits(writer.send(request(number), {}), waits, number)

    with pipe() as (read, write), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run, write)
            for number in range(COUNT):
                tasks.start_soon(send, number)
            await anyio.wait_all_tasks_blocked()
            while received.count(b"\n") < COUNT:
                received += await read.receive()
            tasks.cancel_scope.cancel()
    ids = [message.id for line in received.splitlines() for message in parse_messages(line)]  # type: ignore[union-attr]
    assert ids == list(range(COUNT))
    assert waits and max(waits.values()) == 1


async def test_callers_that_wait_for_a_server_fail_when_it_ends() -> None:
    writer, failed = StdinWriter(OpenRequests()), list[int]()

    async def send(number: int) -> None:
        with suppress(anyio.BrokenResourceError):
            await writer.send(request(number), {})
            return
        failed.append(number)

    with pipe() as (read, write), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run, write)
            for number in range(COUNT):
                tasks.start_soon(send, number)
            await anyio.wait_all_tasks_blocked()
            read.close()
    assert failed and failed == list(range(failed[0], COUNT))

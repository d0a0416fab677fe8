"""A gateway in a process of its own that is answered with large data; prints the peak of its memory, in bytes.

    python -m tests.hostile.memory_probe http objects:4     # transport, tricks with the number of calls at once

The first number is the peak after small answers, the others those after each trick.
"""

from __future__ import annotations

import resource
import sys

import anyio

from gateway.config.models import Limits
from gateway.limits import LimitedToolset
from gateway.tool_table import Source
from gateway.types import ToolCall
from tests.hostile.injector import PATIENCE_S, Entered, answering_toolset, gateway_beside


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def main(transport: str, *tricks: str) -> None:
    async with answering_toolset(transport) as toolset:
        source = Source("hostile", LimitedToolset(Entered(toolset), Limits(timeout_s=PATIENCE_S)))
        async with gateway_beside(source) as gateway, gateway.open() as session:
            for trick in ("fine:20", *tricks):
                name, _, count = trick.partition(":")
                async with anyio.create_task_group() as tasks:
                    for number in range(int(count)):
                        tasks.start_soon(session.call, ToolCall(str(number), name, "{}"))
                sys.stdout.write(f"{peak_bytes()}\n")


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])

"""An MCP server that misbehaves on request, written without the SDK, which would prevent it.

    python tests/servers/misbehaving_server.py --transport stdio|sse|http [flags]

The tools (`faulty_tools.py`) misbehave in one call, the flags for the whole server. Over HTTP the first line on
standard output is the URL. The server supports the 2025-11-25 handshake but not `server/discover`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence

from protocol import Connection, Flags, Shared

LONGEST_LIFE_S = 120
"""A process that ignores SIGTERM ends after this long, so that it does not outlive the test run by much."""


def read_flags(argv: Sequence[str]) -> Flags:
    parser = argparse.ArgumentParser(description="An MCP server that misbehaves on request.")
    parser.add_argument("--transport", choices=("stdio", "sse", "http"), default="stdio")
    parser.add_argument("--listen-port", type=int, default=0, help="a fixed port; otherwise a free one")
    parser.add_argument("--require-token", default="", help="over HTTP, answer 401 without this bearer token")
    parser.add_argument("--never-answer", action="store_true", help="be silent to every request, `initialize` too")
    parser.add_argument("--bad-tools", action="store_true", help="list malformed tools between the good ones")
    parser.add_argument("--pages", type=int, default=1, help="list the tools on this many pages")
    parser.add_argument("--endless-pages", action="store_true", help="each page of the listing names a next one")
    parser.add_argument("--ignore-term", action="store_true", help="stay when stdin ends and when SIGTERM comes")
    parser.add_argument("--ignore-pings", action="store_true", help="be silent to pings")
    return parser.parse_args(argv, namespace=Flags())


async def serve_stdio(flags: Flags) -> None:
    write_lock = asyncio.Lock()

    def write(frame: str) -> None:
        sys.stdout.buffer.write(frame.encode() + b"\n")
        sys.stdout.buffer.flush()

    async def send(frame: str) -> None:
        async with write_lock:
            await asyncio.to_thread(write, frame)

    connection = Connection(shared=Shared(flags), send=send)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        connection.receive(json.loads(line), send)
    if flags.ignore_term:
        await asyncio.Event().wait()


def main() -> None:
    flags = read_flags(sys.argv[1:])
    if flags.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(LONGEST_LIFE_S)
    if flags.transport == "stdio":
        asyncio.run(serve_stdio(flags))
        # Worker threads that are still writing must not keep the process alive.
        os._exit(0)
    # Imported late: starlette and uvicorn take most of the start time, and a stdio server needs neither.
    from http_transports import serve_web

    asyncio.run(serve_web(flags))


if __name__ == "__main__":
    main()

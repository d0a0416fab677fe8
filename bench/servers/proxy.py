"""FastMCP at its best, in its own environment: a proxy in front of the echo server, or a tool of its own.

The proxy keeps one connected client for all calls (by itself it opens one for each), answers with JSON, keeps no
sessions, and runs on uvloop and httptools. It needs at least FastMCP 2.12.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

os.environ |= {"FASTMCP_TELEMETRY_MODE": "off", "FASTMCP_CHECK_FOR_UPDATES": "off", "FASTMCP_LOG_ENABLED": "false"}

import uvicorn
import uvloop
from fastmcp import Client, FastMCP
from fastmcp.client.transports import StdioTransport


@asynccontextmanager
async def open_server(args: argparse.Namespace) -> AsyncIterator[FastMCP[Any]]:
    """The server that is measured."""
    if args.native:
        server: FastMCP[Any] = FastMCP("echo")
        server.tool(echo)
        yield server
        return
    target: Any = args.url or StdioTransport(args.python, [args.script])
    async with Client(target) as client:
        yield make_proxy(client)


async def echo(token: str) -> str:
    """Returns the token."""
    return token


def make_proxy(client: Client[Any]) -> FastMCP[Any]:
    """A proxy over a connected client, which it uses for all calls."""
    try:
        from fastmcp.server import create_proxy
    except ImportError:  # before FastMCP 3
        return FastMCP.as_proxy(client)
    return create_proxy(client)


async def serve(args: argparse.Namespace) -> None:
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    async with open_server(args) as server:
        app = server.http_app(json_response=True, stateless_http=True)
        config = uvicorn.Config(
            app, http="httptools", log_level="error", access_log=False, server_header=False, timeout_keep_alive=75
        )
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
        await uvicorn.Server(config).serve([listener])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--url")
    source.add_argument("--script")
    source.add_argument("--native", action="store_true")
    options.add_argument("--python", default=sys.executable, help="runs the script")
    uvloop.run(serve(options.parse_args()))


if __name__ == "__main__":
    main()

"""A FastMCP proxy before one echo server; it runs in an environment of its own, which has FastMCP and not us."""

from __future__ import annotations

import argparse
import socket
import sys
from typing import Any

import uvicorn
from fastmcp.server import create_proxy


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    choice = options.add_mutually_exclusive_group(required=True)
    choice.add_argument("--url")
    choice.add_argument("--script")
    chosen = options.parse_args()
    stdio = {"mcpServers": {"echo": {"command": sys.executable, "args": [chosen.script]}}}
    target: Any = chosen.url or stdio
    app = create_proxy(target).http_app()
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # so that asyncio sends at once
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_keep_alive=75)).run([listening])


if __name__ == "__main__":
    main()

"""A FastMCP server of `mcp` 1.30 with a synchronous tool that blocks: the whole server answers nothing meanwhile."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.fastmcp import FastMCP

server = FastMCP("blocking", host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
notes: list[str] = []


@server.tool()
def block(seconds: float) -> str:
    """Blocks the server."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def note(text: str) -> str:
    """Notes a text, and returns all notes."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


server.run(transport=sys.argv[1])  # type: ignore[arg-type]

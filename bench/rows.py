"""The rows of the gateway's benchmark: each is one path from a caller to a tool, and the process that is measured.

Each row has a floor in the same run: what the path costs with nothing between its parts. Rows of FastMCP are peers of
those with the same way in and the same tool behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peers import Peer

SERVERS = Path(__file__).with_name("servers")
Behind = Literal["native", "stdio", "http"]


@dataclass(frozen=True, slots=True)
class Row:
    """One path to a tool."""

    key: str
    title: str
    behind: Behind
    """Where the tool is: in the process, or in an MCP server over stdio or HTTP."""
    process: str
    """Key of the measured process."""
    tool: str
    interface: Literal["inside", "calls", "mcp", "sessions"]
    """Called in the process, over `POST /v1/sessions/{id}/calls`, or over MCP; or sessions opened and closed."""
    floor: tuple[str, ...] = ()
    """Keys of the rows whose costs together are this row's floor."""
    at_most: float | None = None
    """How many times its floor it may cost."""
    peer: str = ""
    """Key of FastMCP's row with the same way in and the same tool behind."""
    beats_peer: float | None = None
    """How many times less than its peer it should cost."""


BARE, SDK = "bare-http", "bare-mcp"
RAW_STDIO, RAW_HTTP = "raw-stdio", "raw-http"
ROWS = (
    Row(BARE, "bare Starlette endpoint, the same JSON", "native", "bare", "echo", "calls"),
    Row(SDK, "bare `mcp` server", "native", "bare-mcp", "echo", "mcp"),
    Row(RAW_STDIO, "raw `mcp` client", "stdio", "raw", "raw-stdio", "inside"),
    Row(RAW_HTTP, "raw `mcp` client", "http", "raw", "raw-http", "inside"),
    Row("anew-http", "raw `mcp` client, a session for each call", "http", "raw", "anew-http", "inside", (RAW_HTTP,)),
    Row("native", "mtrl, REST", "native", "ours", "echo", "calls", (BARE,), 1.5),
    Row("stdio", "mtrl, REST", "stdio", "ours", "stdio_echo", "calls", (RAW_STDIO,), 1.3),
    Row("http", "mtrl, REST", "http", "ours", "http_echo", "calls", (RAW_HTTP,)),
    Row("no-uvloop", "mtrl, REST, without uvloop", "native", "no-uvloop", "echo", "calls", (BARE,)),
    Row("session", "mtrl, REST: a session opened and closed", "native", "ours", "echo", "sessions", ("native",), 3),
    Row("fastmcp-native", "FastMCP, MCP", "native", "fastmcp-native", "echo", "mcp", (SDK,)),
    Row("fastmcp-stdio", "FastMCP proxy, MCP", "stdio", "fastmcp-stdio", "echo", "mcp", (SDK, RAW_STDIO)),
    Row("fastmcp-http", "FastMCP proxy, MCP", "http", "fastmcp-http", "echo", "mcp", (SDK, RAW_HTTP)),
    Row("front-native", "mtrl, MCP", "native", "ours", "echo", "mcp", (SDK,), None, "fastmcp-native", 3),
    Row("front-stdio", "mtrl, MCP", "stdio", "ours", "stdio_echo", "mcp", (SDK, RAW_STDIO), None, "fastmcp-stdio", 3),
    Row("front-http", "mtrl, MCP", "http", "ours", "http_echo", "mcp", (SDK, RAW_HTTP), None, "fastmcp-http", 3),
    Row("inside-native", "mtrl in process", "native", "inside", "echo", "inside"),
    Row("inside-thread", "mtrl in process, sync function", "native", "inside", "echo_in_thread", "inside"),
    Row("inside-stdio", "mtrl in process", "stdio", "inside", "stdio_echo", "inside", (RAW_STDIO,)),
    Row("inside-http", "mtrl in process", "http", "inside", "http_echo", "inside", (RAW_HTTP,)),
)
"""In the order of the table: the floors first, then REST, MCP with FastMCP beside it, and calls in the process."""


def echo_command() -> list[str]:
    """Starts the echo server over HTTP."""
    return [sys.executable, str(SERVERS / "echo.py")]


def process_commands(echo_url: str, peer: Peer) -> dict[str, list[str]]:
    """The command of each measured process, by key."""
    ours = [sys.executable, str(SERVERS / "mtrl_server.py")]
    in_process = [sys.executable, str(SERVERS / "in_process.py")]
    commands = {
        "bare": [sys.executable, str(SERVERS / "bare.py")],
        "bare-mcp": echo_command(),
        "raw": [*in_process, "raw"],
        "ours": ours,
        "no-uvloop": [*ours, "--without", "uvloop"],
        "inside": [*in_process, "ours"],
    }
    if not peer.problem:
        proxy = [peer.python, str(SERVERS / "proxy.py")]
        commands["fastmcp-native"] = [*proxy, "--native"]
        commands["fastmcp-stdio"] = [*proxy, "--script", str(SERVERS / "plain_stdio.py"), "--python", sys.executable]
        commands["fastmcp-http"] = [*proxy, "--url", echo_url]
    return commands


def process_env(echo_url: str) -> Mapping[str, str]:
    """The environment of all processes."""
    path = os.pathsep.join(filter(None, (str(SERVERS.parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"ECHO_URL": echo_url, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

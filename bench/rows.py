"""What is measured: each row is one way from a caller to a tool, and the process whose CPU it costs."""

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
    key: str
    title: str
    behind: Behind
    process: str
    """Key of the process that is measured."""
    tool: str
    door: Literal["inside", "calls", "mcp"]
    """In the caller's process, over `POST /v1/sessions/{id}/calls`, or over MCP."""
    target_ms: float | None = None
    beats_fastmcp: float | None = None
    """How many times less than FastMCP before the same server it should cost."""


ROWS = (
    Row("raw-stdio", "raw `mcp` client", "stdio", "raw", "raw-stdio", "inside"),
    Row("raw-http", "raw `mcp` client", "http", "raw", "raw-http", "inside"),
    Row("anew-http", "raw `mcp` client, a session for each call", "http", "raw", "anew-http", "inside"),
    Row("fastmcp-stdio", "FastMCP proxy", "stdio", "fastmcp-stdio", "echo", "mcp"),
    Row("fastmcp-http", "FastMCP proxy", "http", "fastmcp-http", "echo", "mcp"),
    Row("native", "mtrl over HTTP", "native", "ours", "echo", "calls", target_ms=0.5),
    Row("stdio", "mtrl over HTTP", "stdio", "ours", "stdio_echo", "calls", target_ms=1.4, beats_fastmcp=5),
    Row("http", "mtrl over HTTP", "http", "ours", "http_echo", "calls", beats_fastmcp=5),
    Row("no-uvloop", "mtrl over HTTP, without uvloop", "native", "no-uvloop", "echo", "calls"),
    Row("no-httptools", "mtrl over HTTP, without httptools", "native", "no-httptools", "echo", "calls"),
    Row("front-native", "mtrl over MCP", "native", "ours", "echo", "mcp"),
    Row("front-stdio", "mtrl over MCP", "stdio", "ours", "stdio_echo", "mcp"),
    Row("inside-native", "mtrl in process", "native", "inside", "echo", "inside", target_ms=0.06),
    Row("inside-thread", "mtrl in process, sync function", "native", "inside", "echo_in_thread", "inside"),
    Row("inside-stdio", "mtrl in process", "stdio", "inside", "stdio_echo", "inside"),
    Row("inside-http", "mtrl in process", "http", "inside", "http_echo", "inside"),
)
"""In the order of the table."""


def echo_command() -> list[str]:
    return [sys.executable, str(SERVERS / "echo.py"), "--port", "0"]


def commands(echo_url: str, peer: Peer) -> dict[str, list[str]]:
    """By key, how each process is started."""
    ours = [sys.executable, str(SERVERS / "ours.py")]
    inside = [sys.executable, str(SERVERS / "inside.py")]
    found = {
        "raw": [*inside, "raw"],
        "ours": ours,
        "no-uvloop": [*ours, "--without", "uvloop"],
        "no-httptools": [*ours, "--without", "httptools"],
        "inside": [*inside, "ours"],
    }
    if not peer.problem:
        proxy = [peer.python, str(SERVERS / "proxy.py")]
        found["fastmcp-stdio"] = [*proxy, "--script", str(SERVERS / "echo.py")]
        found["fastmcp-http"] = [*proxy, "--url", echo_url]
    return found


def environment(echo_url: str) -> Mapping[str, str]:
    path = os.pathsep.join(filter(None, (str(SERVERS.parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"ECHO_URL": echo_url, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

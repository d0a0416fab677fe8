"""An MCP server over stdio that floods its caller without end; each trick is a tool.

It writes from a thread of its own and never reads again, as a server that has lost its mind would.
"""

from __future__ import annotations

import json
import os
import sys
import time
from threading import Thread
from typing import Any

LIFE_S = 120
"""Whatever happens, the server ends after this time."""


def line(method: str, params: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode() + b"\n"


FLOODS: dict[str, tuple[int, bytes]] = {
    "empty_lines": (1, b"\n" * 8000),
    "lines_that_are_no_json": (1, b"hello, I log to standard output\n" * 800),
    "json_that_is_no_message": (1, b'{"a":1}\n' * 4000),
    "line_without_end": (1, b"x" * 60_000),
    "long_lines": (1, b"x" * 60_000 + b"\n"),
    "notifications": (1, line("notifications/message", {"level": "info", "data": "x"}) * 500),
    "progress": (1, line("notifications/progress", {"progressToken": 1, "progress": 1}) * 500),
    "list_changes": (1, line("notifications/tools/list_changed", {}) * 500),
    "unknown_requests": (1, line("never/heard/of", {}, id=7) * 500),
    "pings": (1, line("ping", {}, id=7) * 500),
    "batches": (1, b"[" + b",".join([b'{"jsonrpc":"2.0","method":"notifications/x"}'] * 900) + b"]\n"),
    "foreign_answers": (1, b'{"jsonrpc":"2.0","id":987654,"result":{}}\n' * 500),
    "standard_error_lines": (2, b"\n" * 60_000),
}
"""Where it writes, and what it repeats without end."""

CUT = {
    "empty_lines": "comments",
    "lines_that_are_no_json": "comments",
    "json_that_is_no_message": "comments",
    "line_without_end": "line",
    "long_lines": "comments",
}
"""Floods for which the connection is cut, with the reason; under the others a call ends by its deadline."""


def reply(message: dict[str, Any]) -> dict[str, Any]:
    match message["method"]:
        case "initialize":
            info = {"name": "flooding", "version": "1"}
            return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("echo", *FLOODS)]}
        case "tools/call":
            return {"content": [{"type": "text", "text": str(message["params"]["arguments"].get("text", ""))}]}
    return {}


def flood(name: str) -> None:
    number, block = FLOODS[name]
    while True:
        os.write(number, block)


def exit_late() -> None:
    time.sleep(LIFE_S)
    os._exit(0)


def main() -> None:
    Thread(target=exit_late, daemon=True).start()
    for text in sys.stdin.buffer:
        message = json.loads(text)
        if "id" not in message:
            continue
        if message["method"] == "tools/call" and message["params"]["name"] in FLOODS:
            flood(message["params"]["name"])
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": reply(message)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""An MCP server over stdio, HTTP or events that answers a call with whatever bytes its trick makes of its id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LIFE_S = 100
"""Whatever happens, the server ends after this time."""


def result(id: Any, inner: bytes) -> bytes:
    """An answer with the given bytes as its structured content."""
    head = b'{"jsonrpc":"2.0","id":%s,"result":{"content":[],"structuredContent":' % json.dumps(id).encode()
    return head + inner + b"}}"


def compact(id: Any) -> bytes:
    return result(id, b'{"a":1}')


def long_error(id: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "error": {"code": -32000, "message": "x" * 12_000_000}}).encode()


def flood(id: Any) -> bytes:
    return b'{"jsonrpc":"2.0","method":"notifications/x"}\n' * 50_000 + compact(id)


def batch(id: Any) -> bytes:
    note = b'{"jsonrpc":"2.0","method":"notifications/x"}'
    return b"[" + b",".join([note] * 300_000) + b"]"


ANSWERS: dict[str, Callable[[Any], bytes]] = {
    "batch": batch,
    "objects": lambda id: result(id, b"[" + b"{}," * 5_000_000 + b"{}]"),
    "keys": lambda id: result(id, b'{"a":' + b'{"b":[1,2,3],"c":' * 150 + b"1" + b"}" * 150 + b"}"),
    "deep": lambda id: result(id, b"[" * 90_000 + b"]" * 90_000),
    "not_utf8": lambda id: result(id, b'{"a":"\xff\xfe"}'),
    "huge_number": lambda id: result(id, b"9" * 20_000),
    "huge_fraction": lambda id: result(id, b"0." + b"9" * 5_000_000),
    "escapes": lambda id: result(id, b'{"a":"' + b"\\n" * 5_000_000 + b'"}'),
    "torn": lambda id: result(id, b'{"a":')[:-3],
    "spaces": lambda id: result(id, b" " * 10_000_000 + b"1"),
    "no_id_torn": lambda id: b'{"jsonrpc":"2.0","result":{"content":[{"type":"text"',
    "pretty": lambda id: json.dumps(json.loads(compact(id)), indent=2).encode(),
    "bom": lambda id: b"\xef\xbb\xbf" + compact(id),
    "utf16": lambda id: compact(id).decode().encode("utf-16"),
    "lsp": lambda id: b"Content-Length: 99\r\n\r",
    "whole_float_id": lambda id: compact(float(id)),
    "float_id": lambda id: compact(id + 0.5),
    "null_id": lambda id: b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no such thing"}}',
    "other_id": lambda id: compact(id + 1000),
    "next_id": lambda id: compact(id + 1),
    "long_error": long_error,
    "flood": flood,
    "fine": compact,
}


def answer(message: dict[str, Any]) -> bytes | None:
    """The bytes that answer a message; None if it needs no answer."""
    if "id" not in message:
        return None
    method, id = message["method"], message["id"]
    if method == "initialize":
        info = {"name": "hostile", "version": "1"}
        value: Any = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {}}
        more = (f"more_{number}" for number in range(int(os.environ.get("MORE_TOOLS", "0"))))
        value = {"tools": [{"name": name, "inputSchema": schema} for name in (*ANSWERS, *ENDS, *more)]}
    elif method == "tools/call":
        name = message["params"]["name"]
        if name in ENDS:
            return ENDS[name]()
        return ANSWERS[name](id)
    else:
        error = {"code": -32601, "message": "no such method"}
        return json.dumps({"jsonrpc": "2.0", "id": id, "error": error}).encode()
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": value}).encode()


def exit_leaving_a_daemon() -> bytes | None:
    """Ends while another process, in a group of its own, holds the pipes."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], start_new_session=True)
    os._exit(3)


def stop_reading() -> bytes | None:
    """Reads nothing more, and answers nothing."""
    time.sleep(LIFE_S)
    return None


ENDS: dict[str, Callable[[], bytes | None]] = {"daemon": exit_leaving_a_daemon, "stuck": stop_reading}


def serve_stdio() -> None:
    for line in sys.stdin.buffer:
        if (data := answer(json.loads(line))) is not None:
            sys.stdout.buffer.write(data + b"\n")
            sys.stdout.buffer.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    as_events = False
    """Whether answers come as events, rather than as JSON."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = answer(message)
        is_event = self.as_events and data is not None
        data = b"data: " + data + b"\n\n" if is_event and data is not None else data
        self.send_response(202 if data is None else 200)
        self.send_header("content-type", "text/event-stream" if is_event else "application/json")
        self.send_header("content-length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        return


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        serve_stdio()
    else:
        Handler.as_events = sys.argv[1] == "events"
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        sys.stdout.write(f"http://127.0.0.1:{server.server_port}/mcp\n")
        sys.stdout.flush()
        server.serve_forever()

"""An MCP server that floods its callers; each trick is a tool.

    python tests/hostile/flooding_server.py          # over HTTP and SSE, at the address that it prints first
    python tests/hostile/flooding_server.py stdio    # never reads again, as a server that has lost its mind would

It writes bytes by itself, because HTTP libraries would refuse to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from threading import Thread
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")

FLOODS: dict[str, bytes] = {
    "comments": b":\n" * 8000,
    "comment_without_end": b": " + b"x" * 60_000,
    "empty_data_lines": b"data:\n" * 8000,
    "data_without_end": b"data: " + b"x" * 60_000 + b"\n",
    "empty_events": b"\r\n" * 8000,
    "events_of_ids": b"id: 1\nevent: message\n\n" * 2000,
    "unknown_fields": b"x: 1\n" * 8000,
}
"""What is repeated on a stream of events without end."""

HTTP_FLOODS: dict[str, tuple[bytes, bytes]] = {
    "continue_without_end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    "headers_without_end": (b"HTTP/1.1 200 OK\r\n", b"X-Again: and again\r\n" * 2000),
    "header_without_end": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x" * 60_000),
    "small_chunks": (CHUNKED, b"1\r\n:\r\n" * 5000),
    "chunk_extensions": (CHUNKED, b"1;" + b"x" * 60_000 + b"\r\n:\r\n"),
}
"""What starts a response, and what is then repeated without end."""


def line(method: str, params: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode() + b"\n"


STDIO_FLOODS: dict[str, tuple[int, bytes]] = {
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

NO_MESSAGES = ("empty_lines", "lines_that_are_no_json", "json_that_is_no_message", "long_lines")
CUT = {**dict.fromkeys(NO_MESSAGES, "comments"), "line_without_end": "line"}
"""Floods for which the connection is cut, with the reason; under the others a call ends by its deadline."""

NAMES = ("echo", "long_id", "long_id_lost", "garbage_events", *FLOODS, *HTTP_FLOODS, *STDIO_FLOODS)


def answer(request_id: Any, text: str) -> bytes:
    result = {"content": [{"type": "text", "text": text}]}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}).encode()


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def json_response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """One TCP connection to the server."""

    streams: dict[str, Client] = {}
    """Open streams of the SSE transport by session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def serve(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.answer_request():
                pass
        self.writer.close()

    async def answer_request(self) -> bool:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("utf-8")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        method, path, _ = first.split(" ")
        if method == "GET":
            return await self.open_stream(path, headers)
        if method == "DELETE":
            await self.send(json_response(b"{}"))
            return True
        message = json.loads(body)
        if path == "/mcp":
            return await self.answer_post(message)
        await self.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
        await self.streams[path].answer_event(message)
        return True

    async def open_stream(self, path: str, headers: dict[str, str]) -> bool:
        if path == "/sse":
            name = f"/messages/{id(self)}"
            self.streams[name] = self
            await self.send(STREAM + b"event: endpoint\ndata: " + name.encode() + b"\n\n")
            await self.reader.read()
            return False
        if "last-event-id" in headers:
            await self.send(STREAM + event(answer(None, headers["last-event-id"])))
            return False
        await self.send(json_response(b"", "405 Method Not Allowed"))
        return True

    async def answer_post(self, message: dict[str, Any]) -> bool:
        if "id" not in message:
            await self.send(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
            return True
        if message["method"] != "tools/call" or message["params"]["name"] == "echo":
            await self.send(json_response(reply(message), headers="mcp-session-id: s1\r\n"))
            return True
        name = message["params"]["name"]
        if name in HTTP_FLOODS:
            await self.flood(*HTTP_FLOODS[name])
        else:
            await self.send(STREAM)
            await self.misbehave(name, message["id"])
        return False

    async def answer_event(self, message: dict[str, Any]) -> None:
        if message.get("method") == "tools/call" and message["params"]["name"] != "echo":
            with contextlib.suppress(ConnectionError):
                await self.misbehave(message["params"]["name"], message["id"])
            self.writer.close()
        elif "id" in message:
            await self.send(event(reply(message)))

    async def misbehave(self, name: str, request_id: Any) -> None:
        if name == "long_id":
            await self.send(b"id: " + b"x" * 15_000_000 + b"\n" + event(answer(request_id, "fine")))
        elif name == "long_id_lost":
            await self.send(b"id: " + b"x" * 15_000_000 + b"\ndata:\n\n")
        elif name == "garbage_events":
            await self.flood(b"", b"data: x\n\n" * 4000)
        else:
            await self.flood(b"", FLOODS[name])

    async def flood(self, first: bytes, block: bytes) -> None:
        self.writer.write(first)
        while True:
            await self.send(block)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


def reply(message: dict[str, Any]) -> bytes:
    """The well-behaved answer to a request."""
    request_id, method = message["id"], message["method"]
    if method == "tools/call":
        return answer(request_id, str(message["params"]["arguments"].get("text", "")))
    if method == "tools/list":
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]
        return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": {"tools": tools}}).encode()
    if method == "initialize":
        about = {"name": "flooding", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
        return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}).encode()
    error = {"code": -32601, "message": "no such method"}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode()


def serve_stdio() -> None:
    for text in sys.stdin.buffer:
        message = json.loads(text)
        if "id" not in message:
            continue
        if message["method"] == "tools/call" and message["params"]["name"] in STDIO_FLOODS:
            number, block = STDIO_FLOODS[message["params"]["name"]]
            while True:
                os.write(number, block)
        sys.stdout.buffer.write(reply(message) + b"\n")
        sys.stdout.buffer.flush()


async def serve_http() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Client(reader, writer).serve()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


def exit_with_parent() -> None:
    """Ends the process when its parent dies, because a killed test run cannot stop its servers."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    Thread(target=exit_with_parent, daemon=True).start()
    if "stdio" in sys.argv:
        serve_stdio()
    else:
        asyncio.run(serve_http())

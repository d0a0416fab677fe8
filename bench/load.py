"""The load must cost less than what it loads: requests are bytes made ahead, and answers are only looked through.

Every call carries a token of its own, and is right where its answer brings that token back and nothing follows it.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 120.0
TOKEN = 12
"""Characters of a token: with all of one length, so are all requests of one speaker."""
_PLACE = "@" * TOKEN
_MCP = "2026-07-28"


@dataclass(frozen=True, slots=True)
class Speaker:
    """A request with a place for its token, and what a good answer to it has."""

    head: bytes
    tail: bytes
    good: bytes

    def request(self, token: bytes) -> bytes:
        return self.head + token + self.tail


def speaker(url: str, path: str, body: Any, good: bytes, **headers: str) -> Speaker:
    head, tail = post(url, path, body, **headers).split(_PLACE.encode())
    return Speaker(head, tail, good)


def post(url: str, path: str, body: Any, **headers: str) -> bytes:
    """A whole request."""
    text = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text


def ours(url: str, session: str, tool: str) -> Speaker:
    """One call of an assistant's message."""
    function = {"name": tool, "arguments": json.dumps({"token": _PLACE})}
    body = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return speaker(url, f"/v1/sessions/{session}/calls", body, b'"outcome":"ok"')


def mcp(url: str, tool: str) -> Speaker:
    """One request of the era that has no sessions, so that nothing precedes it."""
    names = ("protocolVersion", "clientInfo", "clientCapabilities")
    values: tuple[Any, ...] = (_MCP, {"name": "bench", "version": "1"}, {})
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in zip(names, values, strict=True)}
    params = {"name": tool, "arguments": {"token": _PLACE}, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    accept = "application/json, text/event-stream"
    headers = {"Accept": accept, "MCP_Protocol_Version": _MCP, "Mcp_Method": "tools/call", "Mcp_Name": tool}
    return speaker(url, "/mcp", body, b'"result"', **headers)


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """One request whose cost does not matter."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: HTTP {response.status}: {text[:300]!r}")
        return json.loads(text)
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Fired:
    right: int
    wall_s: float
    client_s: float
    """CPU of this process while it fired."""


class _Line:
    """One connection, with at most one request on it."""

    __slots__ = ("answer", "socket")

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname or "", place.port or 80), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer = b""

    def send(self, request: bytes) -> None:
        self.answer = b""
        self.socket.sendall(request)

    def ended(self) -> bool:
        """Takes what has come; whether that is the whole answer."""
        chunk = self.socket.recv(65536)
        if not chunk:
            raise RuntimeError(f"the server hung up in the middle of an answer: {self.answer[:300]!r}")
        self.answer += chunk
        return whole(self.answer)


class _Caller(_Line):
    """A line with a speaker, whose calls are numbered."""

    __slots__ = ("speaker", "token")

    def __init__(self, url: str, speaker: Speaker) -> None:
        super().__init__(url)
        self.speaker, self.token = speaker, b""

    def call(self, number: int) -> None:
        self.token = b"%0*x" % (TOKEN, number)
        self.send(self.speaker.request(self.token))

    @property
    def right(self) -> bool:
        answer = self.answer
        return answer.startswith(b"HTTP/1.1 200") and self.speaker.good in answer and self.token in answer


def whole(answer: bytes) -> bool:
    """Whether an answer has come to its end; raises where something follows the end."""
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    _, sized, rest = head.lower().partition(b"content-length:")
    if not sized:
        return body.endswith(b"0\r\n\r\n")
    missing = int(rest.partition(b"\r\n")[0]) - len(body)
    if missing < 0:
        raise RuntimeError(f"more than one answer to one request: {answer[:300]!r}")
    return missing == 0


def fire(url: str, speakers: Sequence[Speaker], calls: int) -> Fired:
    """`calls` calls over one connection for each speaker, each with a call on it at any time."""
    numbers, right = count(), 0
    callers = [_Caller(url, speaker) for speaker in speakers[:calls]]
    with selectors.DefaultSelector() as ready:
        wall, cpu = time.perf_counter(), time.process_time()
        for caller in callers:
            ready.register(caller.socket, selectors.EVENT_READ, caller)
            caller.call(next(numbers))
        open_calls = len(callers)
        while open_calls:
            events = ready.select(PATIENCE_S)
            if not events:
                raise RuntimeError(f"{open_calls} calls have had no answer for {PATIENCE_S:g} s")
            for key, _ in events:
                caller = key.data
                if not caller.ended():
                    continue
                right += caller.right
                if (number := next(numbers)) < calls:
                    caller.call(number)
                else:
                    open_calls -= 1
        fired = Fired(right, time.perf_counter() - wall, time.process_time() - cpu)
    for caller in callers:
        caller.socket.close()
    return fired


def together(url: str, requests: Sequence[bytes]) -> list[bytes]:
    """Every request on a connection of its own, all sent before the first answer is read; the whole answers."""
    lines = [_Line(url) for _ in requests]
    with selectors.DefaultSelector() as ready:
        for line, request in zip(lines, requests, strict=True):
            ready.register(line.socket, selectors.EVENT_READ, line)
            line.send(request)
        missing = len(lines)
        while missing:
            events = ready.select(PATIENCE_S)
            if not events:
                raise RuntimeError(f"{missing} requests have had no answer for {PATIENCE_S:g} s")
            for key, _ in events:
                if key.data.ended():
                    ready.unregister(key.fileobj)
                    missing -= 1
    for line in lines:
        line.socket.close()
    return [line.answer for line in lines]

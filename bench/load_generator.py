"""A cheap HTTP load generator: requests are built ahead as bytes, and responses are only searched.

Every call has a token of its own; it is right if its response has that token and nothing follows the response.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from itertools import count
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
TOKEN_CHARS = 12
"""All tokens are of one length, and so are all requests of one template."""
_PLACEHOLDER = "@" * TOKEN_CHARS
_PROTOCOL_VERSION = "2026-07-28"


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """A request without its token, and what a good response has."""

    head: bytes
    tail: bytes
    expected: bytes
    opens_session: bool = False
    """The response is a session, which is closed before the next one is opened."""

    def request(self, token: bytes) -> bytes:
        return self.head + token + self.tail


def make_template(url: str, path: str, body: Any, expected: bytes, **headers: str) -> RequestTemplate:
    """The template of a request whose body has the placeholder."""
    head, tail = build_post(url, path, body, **headers).split(_PLACEHOLDER.encode())
    return RequestTemplate(head, tail, expected)


def build_post(url: str, path: str, body: Any, **headers: str) -> bytes:
    """A complete POST request."""
    text = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text


def gateway_call(url: str, session: str, tool: str) -> RequestTemplate:
    """One tool call through the gateway's HTTP API."""
    function = {"name": tool, "arguments": json.dumps({"token": _PLACEHOLDER})}
    body = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return make_template(url, f"/v1/sessions/{session}/calls", body, b'"outcome":"ok"')


def mcp_call(url: str, tool: str) -> RequestTemplate:
    """One tool call over MCP, in the protocol version without sessions, so that no handshake precedes it."""
    names = ("protocolVersion", "clientInfo", "clientCapabilities")
    values: tuple[Any, ...] = (_PROTOCOL_VERSION, {"name": "bench", "version": "1"}, {})
    meta = {f"io.modelcontextprotocol/{name}": value for name, value in zip(names, values, strict=True)}
    params = {"name": tool, "arguments": {"token": _PLACEHOLDER}, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    accept = "application/json, text/event-stream"
    headers = {
        "Accept": accept,
        "MCP_Protocol_Version": _PROTOCOL_VERSION,
        "Mcp_Method": "tools/call",
        "Mcp_Name": tool,
    }
    return make_template(url, "/mcp", body, b'"result"', **headers)


def session_request(url: str) -> RequestTemplate:
    """Opening a session over the gateway's HTTP API; closing it belongs to the same call."""
    template = make_template(url, "/v1/sessions", {"id": _PLACEHOLDER}, b'"rewards":[]')
    return replace(template, opens_session=True)


def request_json(url: str, method: str, path: str, body: Any = None) -> Any:
    """One request outside the measurement; raises RuntimeError for an HTTP error."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: HTTP {response.status}: {text[:300]!r}")
        return json.loads(text)
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load came to."""

    right: int
    wall_s: float
    client_cpu_s: float
    """CPU of this process meanwhile."""
    seconds: list[float]
    """From each call to its response."""


class _Connection:
    """One connection with at most one request on it."""

    __slots__ = ("response", "socket")

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.socket = socket.create_connection((address.hostname or "", address.port or 80), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.response = b""

    def send(self, request: bytes) -> None:
        self.response = b""
        self.socket.sendall(request)

    def receive(self) -> bool:
        """Reads what has arrived; returns whether the response is complete."""
        chunk = self.socket.recv(65536)
        if not chunk:
            raise RuntimeError(f"the server closed the connection within a response: {self.response[:300]!r}")
        self.response += chunk
        return is_complete(self.response)


class _Caller(_Connection):
    """A connection that sends one template's calls, numbered."""

    __slots__ = ("called_at", "is_closing", "template", "token")

    def __init__(self, url: str, template: RequestTemplate) -> None:
        super().__init__(url)
        self.template, self.token, self.is_closing, self.called_at = template, b"", False, 0.0

    def call(self, number: int) -> None:
        self.token, self.called_at = b"%0*x" % (TOKEN_CHARS, number), time.perf_counter()
        self.send(self.template.request(self.token))

    def receive(self) -> bool:
        """The same; a session that was opened is closed first."""
        if not super().receive():
            return False
        if self.template.opens_session and not self.is_closing:
            _, _, rest = self.response.partition(b'"id":"')
            self.token = rest.partition(b'"')[0]
            self.is_closing = True
            self.send(b"DELETE /v1/sessions/%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % self.token)
            return False
        self.is_closing = False
        return True

    @property
    def is_right(self) -> bool:
        response = self.response
        return response.startswith(b"HTTP/1.1 200") and self.template.expected in response and self.token in response


def is_complete(response: bytes) -> bool:
    """Whether a response has arrived completely; raises RuntimeError if something follows it."""
    head, separator, body = response.partition(b"\r\n\r\n")
    if not separator:
        return False
    _, length_header, rest = head.lower().partition(b"content-length:")
    if not length_header:
        return body.endswith(b"0\r\n\r\n")
    missing = int(rest.partition(b"\r\n")[0]) - len(body)
    if missing < 0:
        raise RuntimeError(f"more than one response to one request: {response[:300]!r}")
    return missing == 0


def run_load(url: str, templates: Sequence[RequestTemplate], calls: int) -> LoadResult:
    """Sends a number of calls over one connection per template, each with one call under way at any time."""
    numbers, right, seconds = count(), 0, []
    callers = [_Caller(url, template) for template in templates[:calls]]
    with selectors.DefaultSelector() as ready:
        wall, cpu = time.perf_counter(), time.process_time()
        for caller in callers:
            ready.register(caller.socket, selectors.EVENT_READ, caller)
            caller.call(next(numbers))
        open_calls = len(callers)
        while open_calls:
            events = ready.select(TIMEOUT_S)
            if not events:
                raise RuntimeError(f"{open_calls} calls have had no response for {TIMEOUT_S:g} s")
            for key, _ in events:
                caller = key.data
                if not caller.receive():
                    continue
                right += caller.is_right
                seconds.append(time.perf_counter() - caller.called_at)
                if (number := next(numbers)) < calls:
                    caller.call(number)
                else:
                    open_calls -= 1
        result = LoadResult(right, time.perf_counter() - wall, time.process_time() - cpu, seconds)
    for caller in callers:
        caller.socket.close()
    return result


def send_all(url: str, requests: Sequence[bytes]) -> list[bytes]:
    """Sends every request on a connection of its own before reading the first response; returns all responses."""
    connections = [_Connection(url) for _ in requests]
    with selectors.DefaultSelector() as ready:
        for connection, request in zip(connections, requests, strict=True):
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(request)
        missing = len(connections)
        while missing:
            events = ready.select(TIMEOUT_S)
            if not events:
                raise RuntimeError(f"{missing} requests have had no response for {TIMEOUT_S:g} s")
            for key, _ in events:
                if key.data.receive():
                    ready.unregister(key.fileobj)
                    missing -= 1
    for connection in connections:
        connection.socket.close()
    return [connection.response for connection in connections]

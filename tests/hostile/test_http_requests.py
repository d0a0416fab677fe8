"""Callers that send heads without end, nothing, or a byte now and then are cut off before the token is looked at."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TOKEN = "correct-horse-battery-staple"
WITHIN_S = 60.0
"""How long a cut may take on a machine that is busy with other tests; the limits are a second."""
MOST_SENT_BYTES = 64_000_000
"""What the kernel's buffers may take from a caller beyond the gateway's limits, with much to spare."""
MORE_MEMORY_BYTES = 150_000_000


@dataclass
class SmallGateway:
    host: str
    port: int
    process: psutil.Process

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=WITHIN_S)

    @property
    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    def ask(self, request: bytes) -> bytes:
        """Sends one request on a new connection; the whole response."""
        with self.connect() as caller:
            caller.sendall(request)
            return read_to_end(caller)

    def assert_answers(self) -> float:
        """Asserts that a healthy caller is answered; in how many seconds."""
        start = time.monotonic()
        assert self.ask(request("/healthz")).startswith(b"HTTP/1.1 200 ")
        return time.monotonic() - start


def is_cut_off(caller: socket.socket) -> bool:
    """Whether the gateway closed the connection; raises TimeoutError if nothing came of it yet."""
    try:
        return not caller.recv(65_536)
    except ConnectionError:
        return True


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_to_end(caller: socket.socket) -> bytes:
    data = bytearray()
    try:
        while piece := caller.recv(65_536):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)


@contextmanager
def small_gateway(**settings: Any) -> Iterator[SmallGateway]:
    command = [sys.executable, "-m", "tests.hostile.small_gateway", json.dumps(settings)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            assert child.stdout is not None
            host, port = child.stdout.readline().split()[1].removeprefix("http://").split(":")
            yield SmallGateway(host, int(port), psutil.Process(child.pid))
        finally:
            child.kill()


@pytest.fixture(scope="module")
def gateway() -> Iterator[SmallGateway]:
    with small_gateway(token=TOKEN, head_s=1, body_s=1) as served:
        yield served


START = b"GET /v1/tools HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = START.replace(b"GET", b"POST")
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

FLOODS = {
    "headers": (START, b"X-Again: and again\r\n" * 1000, 431),
    "a header": (START + b"X-Long: ", b"x" * 60_000, 431),
    "a path": (b"GET /", b"x" * 60_000, 431),
    "empty lines": (b"", b"\r\n" * 8000, 431),
    "trailers": (CHUNKED + b"0\r\n", b"X-Again: and again\r\n" * 1000, 401),
    "chunk extensions": (CHUNKED, b"1;" + b"x" * 60_000 + b"\r\n:\r\n", 401),
    "a body that was refused": (CHUNKED, b"10000\r\n" + b"x" * 65_536 + b"\r\n", 401),
    "requests": (START + b"\r\n", START + b"\r\n", 401),
}
"""What a caller starts with, what it then repeats without end, and what it may be answered."""


@pytest.mark.parametrize("name", FLOODS)
def test_caller_that_never_ends_its_head_is_cut_off_before_the_token(gateway: SmallGateway, name: str) -> None:
    first, block, status = FLOODS[name]
    memory, sent, answer = gateway.memory, 0, b""
    with gateway.connect() as caller:
        try:
            caller.sendall(first)
            while sent < MOST_SENT_BYTES:
                caller.sendall(block)
                sent += len(block)
        except OSError:
            answer = read_to_end(caller)
    assert sent < MOST_SENT_BYTES
    assert not answer or answer.startswith((b"HTTP/1.1 %d " % status, b"HTTP/1.1 4"))
    assert gateway.memory < memory + MORE_MEMORY_BYTES
    assert gateway.assert_answers() < WITHIN_S


@pytest.mark.parametrize(
    "head",
    [
        request("/v1/tools", "X-Long: " + "x" * 40_000),
        request("/v1/tools?" + "x" * 40_000),
        request("/v1/tools", *[f"X-{number}: 1" for number in range(101)]),
    ],
)
def test_head_that_is_too_large_is_refused_with_431(gateway: SmallGateway, head: bytes) -> None:
    answer = gateway.ask(head)
    assert answer.startswith(b"HTTP/1.1 431 ") and b"too_large" in answer


def test_head_that_begins_with_the_end_of_a_body_is_bounded_too(gateway: SmallGateway) -> None:
    body = f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n{{"
    with gateway.connect() as caller:
        for piece in (POST.replace(b"tools", b"sessions") + body.encode(), b"}" + START + b"X: " + b"x" * 40_000):
            caller.sendall(piece)
            gateway.assert_answers()  # So it was read.
        caller.sendall(b"\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 431 " in read_to_end(caller)


TRICKLES = {
    "nothing": (b"", b""),
    "half a head": (START, b""),
    "a head by bytes": (START + b"X-Slow: ", b"x"),
    "empty lines": (b"", b"\r\n"),
    "half a body without a token": (POST + b"Content-Length: 100\r\n\r\n", b""),
    "a body by bytes": (
        POST.replace(b"tools", b"sessions")
        + f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 10000\r\n\r\n".encode(),
        b"x",
    ),
    "chunks by bytes": (CHUNKED, b"1\r\nx\r\n"),
}
"""What a caller starts with, and what it sends again and again."""


@pytest.mark.parametrize("name", TRICKLES)
def test_caller_that_is_too_slow_is_cut_off(gateway: SmallGateway, name: str) -> None:
    first, again = TRICKLES[name]
    deadline = time.monotonic() + WITHIN_S
    with gateway.connect() as caller:
        caller.sendall(first)
        caller.settimeout(0.1)
        while True:
            assert time.monotonic() < deadline
            with suppress(TimeoutError):
                if is_cut_off(caller):
                    break
            try:
                caller.sendall(again)
            except ConnectionError:
                break
    gateway.assert_answers()


def test_slow_head_and_body_are_answered_with_408(gateway: SmallGateway) -> None:
    head = f"Content-Type: application/json\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 10000\r\n\r\n"
    for sent in (START, POST.replace(b"tools", b"sessions") + head.encode()):
        with gateway.connect() as caller:
            caller.sendall(sent)
            assert read_to_end(caller).startswith(b"HTTP/1.1 408 ")


def test_pipelined_requests_are_answered_in_order(gateway: SmallGateway) -> None:
    with gateway.connect() as caller:
        head = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        caller.sendall(head.encode() * 3 + request("/healthz"))
        assert read_to_end(caller).count(b"HTTP/1.1 200 ") == 4


def test_trailers_never_pass_for_headers(gateway: SmallGateway) -> None:
    head = request("/v1/sessions", "Transfer-Encoding: chunked", method="POST")
    answer = gateway.ask(head + f"0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_nothing_is_kept_of_the_trailers_of_a_long_body(gateway: SmallGateway) -> None:
    memory = gateway.memory
    with gateway.connect() as caller:
        caller.sendall(CHUNKED + b"700000\r\n" + b"x" * 0x700000 + b"\r\n0\r\n")
        caller.sendall(b"ab:cd\r\n" * 1_000_000)
        gateway.assert_answers()
        assert gateway.memory < memory + 80_000_000


def test_a_head_that_begins_where_a_body_ended_has_no_more_fields_than_others(gateway: SmallGateway) -> None:
    with gateway.connect() as caller:
        caller.sendall(POST + b"Content-Length: 1\r\n\r\n")
        assert b"HTTP/1.1 401 " in caller.recv(65_536)
        caller.sendall(b"x" + START + b"ab:cd\r\n" * 5_000)
        assert b"HTTP/1.1 431 " in read_to_end(caller)


def raise_open_file_limit() -> int:
    """How many files this process may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = 65_536
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return most


def test_healthy_callers_are_answered_beside_5000_half_open_requests() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(5_000, raise_open_file_limit() - 500)
    assert count >= 500, f"the hard limit on open files allows only {count} connections, which shows nothing"
    try:
        with ExitStack() as stack:
            # A head may take longer than this test, so that only the limit on open heads cuts any off.
            gateway = stack.enter_context(small_gateway(head_s=4 * WITHIN_S))
            memory, deadline = gateway.memory, time.monotonic() + 3 * WITHIN_S
            callers = selectors.DefaultSelector()
            stack.callback(callers.close)
            for number in range(count):
                caller = stack.enter_context(gateway.connect())
                caller.sendall(START + b"X-Half: " + b"x" * 1000)
                caller.setblocking(False)
                callers.register(caller, selectors.EVENT_READ)
                if number % 1000 == 0:
                    assert gateway.assert_answers() < WITHIN_S
            assert gateway.assert_answers() < WITHIN_S
            assert gateway.memory < memory + 2 * MORE_MEMORY_BYTES
            # Those beyond the limit are gone, the oldest first; the others still wait.
            cut = 0
            while count - cut > 4096:
                assert time.monotonic() < deadline, f"{cut} of {count} half-open requests were cut off"
                for key, _ in callers.select(timeout=1):
                    callers.unregister(key.fileobj)
                    cut += 1
            assert gateway.process.num_fds() < count or count <= 4096
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

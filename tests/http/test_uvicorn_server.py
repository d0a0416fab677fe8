"""Tests of the uvicorn server: startup, errors and graceful shutdown."""

from __future__ import annotations

import json
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.http.uvicorn_server import bind_socket
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async
from tests.waiting import PATIENCE_S

CALLERS = 200
PROGRAM = """
from gateway.gateway import Gateway
from gateway.http.uvicorn_server import run
from gateway.http.settings import Settings
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from tests.toolset_conformance.sample_tools import Judge, make_judge

class Loud(Judge):
    async def release(self, instance_id, **kwargs):
        print("released", flush=True)

tool = make_judge()
tool.tool.__class__ = Loud
run(Gateway([Source("judge", NativeToolset([tool]))]), Settings(port=0))
print("left", flush=True)
"""


@contextmanager
def program() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            yield child
        finally:
            child.kill()


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_signal_closes_sessions_before_the_process_ends(sign: signal.Signals) -> None:
    with program() as child:
        line = first_line(child)
        url = line.split()[1]
        assert line.startswith("mtrl-gateway: http://127.0.0.1:") and line.endswith(f"web UI: {url}/ui\n")
        request = urllib.request.Request(f"{url}/v1/sessions", b"{}", {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["id"]
        child.send_signal(sign)
        out, err = child.communicate(timeout=PATIENCE_S)
    assert (out, child.returncode) == ("released\nleft\n", 0), err


def test_port_in_use_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"(?s)127\.0\.0\.1:{port} is in use.*choose another port"):
            bind_socket(Settings(port=port))


def test_callers_who_connect_together_are_accepted_before_any_is_answered_again() -> None:
    """Else the last one waits until the others have made hundreds of calls."""
    with program() as child, ExitStack() as stack:
        host, port = first_line(child).split()[1].removeprefix("http://").split(":")
        request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        selector = stack.enter_context(selectors.DefaultSelector())
        child.send_signal(signal.SIGSTOP)
        for _ in range(CALLERS):
            caller = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            caller.sendall(request)
            selector.register(caller, selectors.EVENT_READ)
        child.send_signal(signal.SIGCONT)
        answers: Counter[object] = Counter()
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < CALLERS and time.monotonic() < deadline:
            for key, _ in selector.select(1):
                if key.fileobj.recv(1 << 20).endswith(b"}"):  # type: ignore[union-attr]
                    answers[key.fd] += 1
                    key.fileobj.sendall(request)  # type: ignore[union-attr]
        assert len(answers) == CALLERS
        assert max(answers.values()) <= 10


COLLECTED = """
import gc, anyio, anyio.lowlevel
from gateway.gateway import Gateway
from gateway.http.uvicorn_server import collect_garbage_seldom
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.settings import Settings
from gateway.http.state import AppState
from gateway.types import Task, ToolCall
from tests.http.api_client import http_sources

async def main():
    async with Gateway(http_sources()) as gateway:
        collect_garbage_seldom()
        app = AppState(gateway, Settings(), DisconnectWatcher())
        before, full = len(gc.get_objects()), gc.get_stats()[2]["collections"]
        opened = [await app.open_session(Task(), anyio.sleep_forever, strict=False) for _ in range(2000)]
        print((len(gc.get_objects()) - before) / len(opened) / len(gateway.sources))
        for _ in range(10):
            for each in opened:
                await each.session.call(ToolCall("1", "add", '{"a": 1, "b": 2}'))
        print(gc.get_stats()[2]["collections"] - full)
        gc.disable()
        for each in opened:
            await each.session.close()
        del opened, each
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        print(sum(type(each).__module__ == "gateway.session" for each in gc.get_objects()))

anyio.run(main)
"""


def test_many_sessions_cost_no_full_garbage_collection() -> None:
    """All calls wait for one, and it passes over every object of every session."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED], capture_output=True, text=True, cwd=root, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    of_open, full, of_closed = map(float, done.stdout.splitlines()[-3:])
    assert of_open < 30, "objects of a session, for each of its sources"
    assert full == 0, "full collections"
    assert of_closed == 0, "objects that a closed session leaves to the collector"


async def test_mounted_applications_are_behind_the_security_middleware() -> None:
    happened = []

    async def echo(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["method"].encode() + b" " + body})

    @asynccontextmanager
    async def background() -> AsyncIterator[None]:
        happened.append("begun")
        yield
        happened.append("ended")

    settings = Settings(port=0, body_bytes=100)
    async with live_server_async(
        lambda: Gateway(http_sources()), settings, mounts={"/mcp": echo}, background=[background()]
    ) as server:
        client = ApiClient(server.url)
        with anyio.fail_after(PATIENCE_S):
            host, port = server.url.removeprefix("http://").split(":")
            for headers, body, expected in (
                ("Content-Length: 2", b"hi", b"POST hi"),
                ("Transfer-Encoding: chunked", b"2\r\nhi\r\n0\r\n\r\n", b"POST hi"),
                ("Transfer-Encoding: chunked", b"70\r\n" + b"x" * 0x70 + b"\r\n", b"too_large"),
            ):
                async with await anyio.connect_tcp(host, int(port)) as stream:
                    head = f"POST /mcp HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n"
                    head += "Content-Type: application/json\r\n\r\n"
                    await stream.send(head.encode() + body)
                    answer = b"".join([piece async for piece in stream])
                assert expected in answer
        assert (await client("POST", "/mcp", {}, host="evil.example")).status_code == 403
        assert happened == ["begun"]
    assert happened == ["begun", "ended"]

"""Tests of the uvicorn server: startup, errors and graceful shutdown."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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

PROGRAM = """
import resource, sys, anyio
from gateway.gateway import Gateway
from gateway.http.uvicorn_server import run
from gateway.http.settings import Settings
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from tests.toolset_conformance.sample_tools import Judge, make_judge

class Loud(Judge):
    async def release(self, instance_id, **kwargs):
        print("released", flush=True)

class Late(NativeToolset):
    async def __aenter__(self):
        print("starting", flush=True)
        await anyio.sleep_forever()

tool = make_judge()
tool.tool.__class__ = Loud
if "few files" in sys.argv:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kind = Late if "late" in sys.argv else NativeToolset
run(Gateway([Source("judge", kind([tool]))]), Settings(port=0))
print("left", flush=True)
"""


@contextmanager
def program(*args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, *args]
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

"""Tests of errors in handlers: a short error for the client, details in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest

from gateway.gateway import Gateway
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.toolset import Session
from gateway.types import Task
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import LiveServer, live_server_async
from tests.waiting import PATIENCE_S, wait_until


class Broken(NativeToolset):
    """Cannot open a session."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self.error = error
        self.specs = http_sources()[0].toolset.specs

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        raise self.error
        yield


async def begun(error: Exception) -> httpx2.Response:
    async with live_server_async(lambda: Gateway([Source("broken", Broken(error))])) as server:
        return await ApiClient(server.url)("POST", "/v1/sessions", {})


async def test_unexpected_error_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    answer = await begun(RuntimeError("password=hunter2"))
    assert answer.status_code == 500
    assert answer.json() == {"error": {"type": "internal", "message": "The gateway failed; its log says why."}}
    assert "/v1/sessions failed" in caplog.text


async def test_disconnect_within_a_body_leaves_no_session(server: LiveServer, client: ApiClient) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    before = set(server.gateway.sessions)
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(f"POST /v1/sessions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
    assert (await client("GET", "/healthz")).status_code == 200
    assert set(server.gateway.sessions) == before


async def test_held_session_sends_heartbeats(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.session_routes.HEARTBEAT_S", 0.01)
    with anyio.fail_after(PATIENCE_S):
        async with (
            httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as http,
            http.stream("POST", "/v1/sessions?hold=true", json={}) as held,
        ):
            lines = held.aiter_lines()
            id = json.loads(await anext(lines))["id"]
            assert [await anext(lines), await anext(lines)] == ["", ""]
            await lines.aclose()
    await wait_until(lambda: id not in server.gateway.sessions)

"""Tests of errors in handlers: a short error for the client, details in the log."""

from __future__ import annotations

import json

import anyio
import httpx2
import pytest

from gateway.gateway import Gateway
from tests.http.api_client import ApiClient
from tests.live_server import LiveServer
from tests.waiting import PATIENCE_S, wait_until


async def test_unexpected_error_is_a_500_without_details(
    client: ApiClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(Gateway, "begin", fail)
    answer = await client("POST", "/v1/sessions", {})
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

"""What goes wrong behind a room stays behind it: a word to the caller, the reason to the log."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest

from gateway.errors import Unavailable
from gateway.gateway import Gateway
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.toolset import Session
from gateway.types import Task
from tests.http.rooms import Caller, rooms
from tests.served import Served, served, until


class Broken(NativeToolset):
    """Cannot open a session."""

    def __init__(self, error: Exception) -> None:
        super().__init__([])
        self.error = error
        self.specs = rooms()[0].toolset.specs

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        raise self.error
        yield


async def begun(error: Exception) -> httpx2.Response:
    async with served(lambda: Gateway([Source("broken", Broken(error))])) as at:
        return await Caller(at.url)("POST", "/v1/sessions", {})


async def test_an_unforeseen_error_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    answer = await begun(RuntimeError("password=hunter2"))
    assert answer.status_code == 500
    assert answer.json() == {"error": {"type": "internal", "message": "The gateway failed; its log says why."}}
    assert "/v1/sessions failed" in caplog.text


async def test_a_server_that_is_down_is_a_503() -> None:
    answer = await begun(Unavailable("the clock is broken"))
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the clock is broken")


async def test_hanging_up_in_the_middle_of_a_body_leaves_nothing_behind(at: Served, ask: Caller) -> None:
    host, port = at.url.removeprefix("http://").split(":")
    before = set(at.gateway.sessions)
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(f"POST /v1/sessions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n{{".encode())
    assert (await ask("GET", "/healthz")).status_code == 200
    assert set(at.gateway.sessions) == before


async def test_a_held_answer_shows_that_it_is_alive(at: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.sessions.BEAT_S", 0.01)
    with anyio.fail_after(10):
        async with (
            httpx2.AsyncClient(base_url=at.url, trust_env=False) as http,
            http.stream("POST", "/v1/sessions?hold=true", content=b"{}") as held,
        ):
            lines = held.aiter_lines()
            id = json.loads(await anext(lines))["id"]
            assert [await anext(lines), await anext(lines)] == ["", ""]
            await lines.aclose()
    await until(lambda: id not in at.gateway.sessions)


async def test_a_call_that_meets_a_closing_session_is_told_that_it_is_gone(ask: Caller, at: Served) -> None:
    id = await ask.begin()
    session = at.gateway.sessions[id]
    session.closed = True
    try:
        answer = await ask("POST", f"/v1/sessions/{id}/calls", {"tool_calls": []})
    finally:
        session.closed = False
    assert answer.status_code == 404

"""Tests of /v1/live (running calls)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.lowlevel import checkpoint
from starlette.types import Message

from gateway.gateway import Gateway
from gateway.http.activity import HISTORY, MAX_BACKLOG, MAX_CHARS, ActivityLog, session_digest
from gateway.http.activity_routes import PAUSE_S, CallStream
from gateway.session import ObservedCall
from gateway.types import Image, Text, ToolCall, ToolResult
from tests.http.api_client import ApiClient
from tests.live_server import LiveServer
from tests.waiting import PATIENCE_S


@asynccontextmanager
async def watch_calls(url: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The lines of /v1/live/calls."""

    async def lines(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(answer.aiter_lines()) as raw:
            async for line in raw:
                if line:
                    yield json.loads(line)

    http = httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S)
    async with http, http.stream("GET", f"{url}/v1/live/calls") as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        async with aclosing(lines(answer)) as stream:
            yield stream


async def next_call(lines: AsyncIterator[dict[str, Any]], tool: str, id: str) -> dict[str, Any]:
    """The next finished call of a tool in a session."""
    with anyio.fail_after(PATIENCE_S):
        async for line in lines:
            call: dict[str, Any] = line.get("call", {})
            if (call.get("tool"), call.get("session")) == (tool, session_digest(id)):
                return call
    raise AssertionError("the stream has ended")


async def test_call_stream_sends_recent_calls_and_new_ones(client: ApiClient, server: LiveServer) -> None:
    id = await client.begin()
    await client.call(id, "pick", {"colour": "before"})
    async with watch_calls(server.url) as lines:
        before = await next_call(lines, "pick", id)
        await client.call(id, "fails")
        now = await next_call(lines, "fails", id)
    assert json.loads(before["arguments"]) == {"colour": "before"} and before["outcome"] == "ok"
    assert before["parts"] == [{"type": "text", "text": "before None 1"}]
    assert now["outcome"] == "error" and now["reason"]


def make_observed_call(text: str = "x", arguments: str = "{}") -> ObservedCall:
    parts = (Text(text), Image(b"secret", "image/png"))
    return ObservedCall("id", ToolCall("1", "tool", arguments), None, ToolResult(parts))


def test_recent_calls_and_their_texts_are_bounded() -> None:
    live = ActivityLog(Gateway([]), anyio.Event())
    for _ in range(HISTORY + 5):
        live.observe(make_observed_call("y" * 10 * MAX_CHARS, "z" * 10 * MAX_CHARS))
    assert len(live.recent) == HISTORY
    assert len(live.recent[0]["arguments"]) == len(live.recent[0]["parts"][0]["text"]) == MAX_CHARS
    assert live.recent[0]["parts"][1] == {"type": "image", "mime": "image/png"}


async def test_slow_subscriber_misses_calls_and_receives_their_count() -> None:
    live = ActivityLog(Gateway([]), anyio.Event())
    with live.subscribe() as received:
        for _ in range(MAX_BACKLOG + 3):
            live.observe(make_observed_call())
        for _ in range(MAX_BACKLOG):
            assert "missed" not in received.receive_nowait()
        live.observe(make_observed_call())
        assert received.receive_nowait()["missed"] == 3
    live.drop_closed_subscribers()
    live.observe(make_observed_call())


async def test_call_stream_looks_at_the_sessions_a_few_times_a_second_however_many_calls_end() -> None:
    class CountedLog(ActivityLog):
        looks = 0

        @property
        def running(self) -> list[dict[str, Any]]:
            self.looks += 1
            return []

    live, shown, all_shown = CountedLog(Gateway([]), anyio.Event()), 0, anyio.Event()

    async def receive() -> Message:
        await all_shown.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal shown
        shown += message.get("body", b"").count(b'{"call"')
        if shown == 300:
            all_shown.set()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            started = anyio.current_time()
            tasks.start_soon(CallStream(live), {}, receive, send)
            for _ in range(300):
                live.observe(make_observed_call())
                await checkpoint()
    assert live.looks <= 3 + (anyio.current_time() - started) / PAUSE_S

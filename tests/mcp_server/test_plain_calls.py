"""Plain tool calls over HTTP: answered as the SDK answers them, pinged while they last, cancelled with their client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from mcp_types import HEADER_MISMATCH, INVALID_PARAMS
from starlette.types import Message

from gateway.mcp_server import plain_calls
from gateway.mcp_server.server_state import McpServerState
from gateway.toolset import Session, ToolsetWrapper
from gateway.types import Task
from tests.http.api_client import HangingTool
from tests.mcp_server.clients import native_source, serve_gateway
from tests.toolset_conformance.sample_tools import sample_sources
from tests.waiting import PATIENCE_S, wait_until

ABSENT = object()
VERSION = "2026-07-28"
PREFIX = "io.modelcontextprotocol/"
PLAIN_META: dict[str, Any] = {
    f"{PREFIX}protocolVersion": VERSION,
    f"{PREFIX}clientInfo": {"name": "test", "version": "1"},
    f"{PREFIX}clientCapabilities": {},
}


async def post_call(
    http: httpx2.AsyncClient,
    url: str,
    name: str,
    arguments: dict[str, Any],
    meta: dict[str, Any] = PLAIN_META,
    *,
    plain: bool = True,
    **headers: str,
) -> tuple[int, Any]:
    """The status and the JSON of an answer. A call that is not `plain` asks for progress, and is served by the SDK."""
    meta = meta if plain else {**meta, "progressToken": 1}
    params = {"name": name, "arguments": arguments, "_meta": meta}
    request = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    response = await http.post(url, json=request, headers=call_headers(name) | headers)
    return response.status_code, response.json()


def call_headers(name: str) -> dict[str, str]:
    return {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": VERSION,
        "mcp-method": "tools/call",
        "mcp-name": name,
    }


CALLS: tuple[tuple[str, dict[str, Any]], ...] = (("remember", {"word": "a"}), ("remember", {}), ("unknown", {}))


async def test_plain_calls_are_answered_like_those_that_the_sdk_serves() -> None:
    async with serve_gateway(sample_sources) as (url, gateway), httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        calls = [*CALLS, *((spec.name, {}) for spec in gateway.specs if not spec.parameters.get("required"))]
        for name, arguments in calls:
            plain = await post_call(http, url, name, arguments)
            assert plain == await post_call(http, url, name, arguments, plain=False), name
            assert plain[1]["id"] == 7


@pytest.mark.parametrize("more", [{}, {"progressToken": 1}], ids=["plain", "sdk"])
async def test_a_number_that_overflows_is_refused_and_not_null(more: dict[str, Any]) -> None:
    def free(value: Any) -> str:
        """Answers with what it got."""
        return repr(value)

    params = {"name": "free", "arguments": {"value": "NUMBER"}, "_meta": PLAIN_META | more}
    request = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})
    async with serve_gateway(lambda: [native_source(free)]) as (url, _), httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        for number in ("1e999", "-1e999"):
            headers = call_headers("free") | {"content-type": "application/json"}
            response = await http.post(url, content=request.replace('"NUMBER"', number), headers=headers)
            result = response.json()["result"]
            assert result["isError"] and "Infinity is not JSON" in result["content"][0]["text"]


async def test_requests_that_are_not_well_formed_are_refused() -> None:
    async with serve_gateway(sample_sources) as (url, _), httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        status, answer = await post_call(http, url, "remember", {"word": "a"}, **{"mcp-name": "other"})
        assert (status, answer["error"]["code"]) == (400, HEADER_MISMATCH)
        status, answer = await post_call(http, url, "remember", [1])  # type: ignore[arg-type]
        assert answer["error"]["code"] == INVALID_PARAMS
        response = await http.post(
            url, content=b"{", headers=call_headers("remember") | {"content-type": "application/json"}
        )
        assert response.status_code == 400
        refused = await post_call_accepting(http, url, "application/json")
        assert refused.status_code == 406


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("protocolVersion", "2026-07-29", HEADER_MISMATCH),
        ("protocolVersion", None, HEADER_MISMATCH),
        ("clientCapabilities", None, INVALID_PARAMS),
        ("clientCapabilities", ABSENT, INVALID_PARAMS),
        ("protocolVersion", ABSENT, INVALID_PARAMS),
    ],
)
async def test_an_envelope_that_does_not_fit_is_refused_like_the_sdk_refuses_it(
    key: str, value: Any, code: int
) -> None:
    meta = {**PLAIN_META, f"{PREFIX}{key}": value}
    if value is ABSENT:
        del meta[f"{PREFIX}{key}"]
    async with serve_gateway(sample_sources) as (url, _), httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        status, answer = await post_call(http, url, "remember", {"word": "a"}, meta)
        assert (status, answer["error"]["code"]) == (400, code)
        assert (status, answer) == await post_call(http, url, "remember", {"word": "a"}, meta, plain=False)


async def post_call_accepting(http: httpx2.AsyncClient, url: str, accept: str) -> httpx2.Response:
    headers = call_headers("remember") | {"accept": accept, "content-type": "application/json"}
    return await http.post(url, content=json.dumps({"jsonrpc": "2.0"}), headers=headers)


class SlowToOpen(ToolsetWrapper):
    """A toolset whose sessions never open."""

    hanging: HangingTool

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        await self.hanging.hang()
        yield  # type: ignore[misc]


@pytest.mark.parametrize("phase", ["running", "opening", "waiting"])
async def test_the_call_of_a_client_that_disconnects_is_cancelled(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, while its session opens, and while it waits for the tool of a server that starts."""
    hanging = HangingTool()
    source = native_source(hanging.hang)
    if phase == "opening":
        source.toolset = SlowToOpen(source.toolset)
        source.toolset.hanging = hanging
    if phase == "waiting":
        monkeypatch.setattr(McpServerState, "wait_for_tool", lambda self, name: hanging.hang())
    async with serve_gateway(lambda: [source]) as (url, _):
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as http, anyio.create_task_group() as tasks:
            tasks.start_soon(post_call, http, url, "late" if phase == "waiting" else "hang", {})
            await wait_until(hanging.started.is_set)
            tasks.cancel_scope.cancel()
        await wait_until(hanging.cancelled.is_set)


async def test_a_call_whose_session_is_closed_is_answered() -> None:
    hanging, answers = HangingTool(), list[Any]()

    async def call(http: httpx2.AsyncClient, url: str) -> None:
        answers.append(await post_call(http, url, "hang", {}))

    async with (
        serve_gateway(lambda: [native_source(hanging.hang)]) as (url, gateway),
        httpx2.AsyncClient(timeout=PATIENCE_S) as http,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(call, http, url)
        await wait_until(hanging.started.is_set)
        for session in list(gateway.sessions.values()):
            await session.close()
    [(status, answer)] = answers
    assert status == 200 and answer["result"]["_meta"]["mtrl/outcome"] == "cancelled"


async def test_a_long_call_is_pinged_and_answered_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_calls, "PING_S", 0.01)
    sent: list[Message] = []
    pinged = anyio.Event()

    async def receive() -> Message:
        await pinged.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("more_body"):
            pinged.set()

    answer = plain_calls._Answer(receive, send)
    with anyio.fail_after(PATIENCE_S):
        assert (await answer.receive())["type"] == "http.disconnect"
        await answer.finish({}, b'{"id":7}', 200)
    assert sent[0]["status"] == 200 and sent[1]["body"].startswith(b": ping")
    assert sent[-1] == {"type": "http.response.body", "body": b'event: message\r\ndata: {"id":7}\r\n\r\n'}

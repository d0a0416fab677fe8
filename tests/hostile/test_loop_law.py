"""The law: whatever hostile data costs, no path through the gateway holds the event loop longer than the promise.

A row is a path with data that is as large as its limits allow. Each new place that handles such data becomes a row.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
from PIL import Image as Pillow

from gateway.config.models import MediaLimits
from gateway.gateway import Gateway
from gateway.http.uvicorn_server import collect_garbage_seldom
from gateway.large_json import run_beside
from gateway.mcp_client.listing import ListingParser
from gateway.mcp_client.mcp_session import ResultParsers
from gateway.media.media_filter import MediaFilter
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.tape.record import record_gateway
from gateway.tool_table import Source, build_table
from gateway.types import Image, Outcome, Task, ToolCall, ToolSpec
from tests.hostile.injector import (
    PATIENCE_S,
    Meanwhile,
    add,
    assert_not_held,
    gateway_beside,
    healthy_calls,
)
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async

MEGABYTES = 16
TEXTS = {"escapes": '\n"\\\t' * (MEGABYTES << 18), "controls": "\x01" * (MEGABYTES << 20), "umlauts": "ü" * (8 << 20)}
VALUES: dict[str, Any] = {
    "objects": [{"k": 1.5}] * 50_000,
    "texts": {f"key {index}": "ä\n" * 80 for index in range(49_000)},
    "one long text": {"a": ["\n" * (MEGABYTES << 20)]},
}


class Answering(BaseTool):
    """Answers with what its test has prepared."""

    answer: Any = None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return self.answer


def answering(answer: Any) -> Source:
    function = {"name": "answer", "description": "", "parameters": {"type": "object", "properties": {}}}
    tool = Answering({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
    tool.answer = answer
    return Source("answer", NativeToolset([ClassTool(tool)]))


POST = """
import sys, urllib.request
headers = {"content-type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers)
with urllib.request.urlopen(request) as response:
    print(len(response.read()))
"""
"""Sends a request from a process of its own, because reading a large response holds the interpreter as well."""
ANSWERS: dict[str, Any] = {**TEXTS, **VALUES}


@pytest.mark.parametrize(
    ("trick", "layout"), [*((trick, "chat") for trick in ANSWERS), ("controls", "parts"), ("objects", "parts")]
)
async def test_large_answers_leave_over_http(trick: str, layout: str) -> None:
    collect_garbage_seldom()
    async with live_server_async(lambda: Gateway([answering(ANSWERS[trick])])) as server:
        client = ApiClient(server.url)
        session = (await client("POST", "/v1/sessions", b"{}")).json()["id"]
        body = {"layout": layout, "tool_calls": [{"id": "1", "function": {"name": "answer", "arguments": "{}"}}]}
        url = f"{server.url}/v1/sessions/{session}/calls"
        received = await anyio.run_process([sys.executable, "-c", POST, url, json.dumps(body)])
        assert int(received.stdout) > 500_000
        assert_not_held(server.gateway.loop_watchdog)


class CrowdedGateway(Gateway):
    """A gateway that has nearly as many sessions as it may have."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        collect_garbage_seldom()  # As a server does before its first session.
        for _ in range(9_990):
            await self.begin(Task())
        return self


async def test_calls_over_http_beside_ten_thousand_sessions() -> None:
    async with live_server_async(lambda: CrowdedGateway([answering("x")])) as server:
        client, watchdog = ApiClient(server.url), server.gateway.loop_watchdog
        watchdog.longest_own_s = watchdog.longest_process_s = 0.0  # Without what the test did.
        session = await client.begin()
        for _ in range(20):
            assert (await client.call(session, "answer"))["results"][0]["outcome"] == "ok"
        for path in ("/healthz", "/metrics"):
            assert (await client("GET", path)).status_code == 200
        assert (await client("DELETE", f"/v1/sessions/{session}")).is_success
        assert_not_held(watchdog)


@asynccontextmanager
async def watched() -> AsyncIterator[Meanwhile]:
    async with gateway_beside() as gateway, healthy_calls(gateway) as meanwhile:
        yield meanwhile
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("trick", VALUES)
async def test_large_structured_answers_are_decoded(trick: str) -> None:
    async with watched():
        raw = {"content": [], "structuredContent": VALUES[trick]}
        result = await ResultParsers({}).parse(ToolSpec("a"), raw)
    assert json.loads(result.text) == VALUES[trick]


@pytest.mark.parametrize("trick", ["controls", "objects"])
async def test_large_answers_are_recorded(trick: str, tmp_path: Path) -> None:
    gateway = Gateway([Source("healthy", NativeToolset([FunctionTool(add)])), answering(ANSWERS[trick])])
    with anyio.fail_after(PATIENCE_S):
        async with (
            record_gateway(gateway, tmp_path / "tape") as recorded,
            healthy_calls(gateway) as meanwhile,
            recorded.open(Task(tools=("answer",))) as session,
        ):
            result = await session.call(ToolCall("1", "answer", "{}"))
    assert result.outcome is Outcome.OK
    lines = (tmp_path / "tape" / "tape.jsonl").read_text().splitlines()
    (call,) = [line for line in map(json.loads, lines) if line["kind"] == "call"]
    assert call["answer"]["parts"] == [{"type": "text", "text": result.text}]
    meanwhile.assert_undisturbed()


def encoded(format: str, mode: str, side: int) -> bytes:
    data = io.BytesIO()
    Pillow.new(mode, (side, side)).save(data, format)
    return data.getvalue()


IMAGES: dict[str, Callable[[], Sequence[bytes]]] = {
    "grey with transparency": lambda: [encoded("PNG", "LA", 5000)],
    "webp": lambda: [encoded("WEBP", "RGB", 3500)],
    "many small ones": lambda: [encoded("PNG", "RGB", 8)] * 800,
}


@pytest.mark.parametrize("trick", IMAGES)
async def test_large_images_are_checked_and_resized(trick: str) -> None:
    parts = tuple(Image(data, "image/png") for data in IMAGES[trick]())
    async with watched():
        filtered = await MediaFilter(MediaLimits(max_pixels=500_000)).filter_parts(parts)
    assert filtered.parts


def many_tools(count: int) -> list[dict[str, Any]]:
    properties = {f"p{index}": {"type": "string", "description": "x" * 30} for index in range(8)}
    schema = {"type": "object", "properties": properties}
    return [{"name": f"tool_{index}", "description": "d" * 200, "inputSchema": schema} for index in range(count)]


PATTERNS = {
    "one large": ["[^a-z]{1900}"],
    "many": ["[^a-z]{28}" + "x" * index for index in range(100)],
    "refused": ["[^a-z]{9000}"],
    "alternatives": ["|".join(f"{index:x}y" for index in range(1500))],
}


@pytest.mark.parametrize("trick", PATTERNS)
async def test_patterns_are_compiled(trick: str) -> None:
    properties = {f"p{index}": {"type": "string", "pattern": text} for index, text in enumerate(PATTERNS[trick])}
    tool = {"name": "a", "inputSchema": {"type": "object", "properties": properties}}
    async with watched():
        parser = ListingParser("it", modern=False)
        await run_beside(parser.add_page, [tool])
    assert len(parser.listing.specs) + len(parser.listing.quarantined) == 1


def listed(specs: Sequence[ToolSpec]) -> Source:
    """A source with the tools of a listing."""
    toolset = NativeToolset([])
    toolset.specs = specs
    return Source("it", toolset)


async def test_thousands_of_tools_are_listed() -> None:
    collect_garbage_seldom()
    parser = ListingParser("it", modern=False)
    parser.add_page(many_tools(20_000))
    specs = parser.listing.specs
    assert len(specs) < 20_000 and "(listing)" in parser.listing.quarantined
    async with watched():
        build_table([listed(specs)])
    async with live_server_async(lambda: Gateway([listed(specs)])) as server:
        client = ApiClient(server.url)
        for path in ("/v1/tools?strict=true", "/v1/tools?form=spec", "/healthz", "/openapi.json"):
            assert (await client("GET", path)).status_code == 200
        assert (await client("POST", "/v1/sessions", b'{"strict": true}')).status_code == 201
        assert_not_held(server.gateway.loop_watchdog)


BODIES = {
    "values": (b'{"tool_calls":[' + b"{}," * 2_000_000 + b"{}]}", 413),
    "depth": (b'{"messages":' + b"[" * 90_000 + b"]" * 90_000 + b"}", 400),
}


@pytest.mark.parametrize("trick", BODIES)
async def test_body_with_too_many_values_is_refused_beside_the_loop(trick: str) -> None:
    collect_garbage_seldom()
    async with live_server_async(lambda: Gateway(http_sources())) as server:
        client = ApiClient(server.url)
        body, status = BODIES[trick]
        assert (await client("POST", "/v1/calls", body)).status_code == status
        assert (await client("GET", "/healthz")).status_code == 200
        assert_not_held(server.gateway.loop_watchdog)

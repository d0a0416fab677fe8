"""Tests of /metrics."""

from __future__ import annotations

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.http.metrics import OTHER, Metrics
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.server_status import ServerStatus, State
from gateway.mcp_client.transport import Services
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.server_start import ServerStart
from gateway.session import ObservedCall
from gateway.tool_table import Source
from gateway.types import ToolCall, ToolResult, ToolSpec
from tests.http.api_client import ApiClient, HangingTool, http_sources
from tests.live_server import live_server_async
from tests.toolset_conformance.sample_tools import add
from tests.waiting import PATIENCE_S


def read_metrics(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_calls_by_tool_and_outcome() -> None:
    async with live_server_async(lambda: Gateway(http_sources())) as server:
        client = ApiClient(server.url)
        id = await client.begin(feedback="scripted")
        for name, arguments in (("add", '{"a": 1}'), ("add", '{"a": 2}'), ("add", "{}"), ("made", "{}"), ("up", "{}")):
            await client.call(id, name, arguments)
        await client("POST", f"/v1/sessions/{id}/feedback", {"messages": []})
        answer = await client("GET", "/metrics")
        values = read_metrics(answer.text)
    assert answer.headers["content-type"].startswith("text/plain")
    assert values["mtrl_calls_total", "ok", "add"] == 2
    assert values["mtrl_calls_total", "invalid", "add"] == 1
    assert values["mtrl_calls_total", "invalid", "(unknown)"] == 2
    assert values["mtrl_call_seconds_count", "add"] == 3
    assert values["mtrl_result_bytes_count", "add"] == 3
    assert values["mtrl_feedback_turns_total", "ok"] == 1
    assert values["mtrl_sessions_open",] == 1
    assert "made" not in answer.text and id not in answer.text


async def test_metrics_of_excess_tools_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.metrics.MAX_TOOLS", 3)
    async with Gateway([]) as gateway:
        metrics = Metrics(gateway)
        for place in range(8):
            spec = ToolSpec(f"tool{place}")
            metrics.observe(ObservedCall("s", ToolCall("c", spec.name), spec, ToolResult()))
        values = read_metrics(metrics.text.decode())
    assert values["mtrl_calls_total", "ok", OTHER] == 5
    assert ("mtrl_calls_total", "ok", "tool3") not in values


class FixedServer(McpToolset):
    """Is in one state, and is never entered."""

    status = None  # type: ignore[assignment]

    def __init__(self, status: ServerStatus) -> None:
        super().__init__(status.name, Server(command="none"), services=Services())
        self.status = status

    async def wait_started(self) -> None:
        pass


def source_of_server(name: str, state: State, reason: str = "", tool: FunctionTool | None = None) -> Source:
    status = ServerStatus(name, state, reason, tools=1, reconnects=3, children=(1, 2))
    backend = FixedServer(status)
    limited = LimitedToolset(NativeToolset([] if tool is None else [tool]), Limits(at_once=1))
    return Source(name, limited, backend=backend, name=name, trusted=False)


async def test_metrics_and_health_report_server_state() -> None:
    def make() -> Gateway:
        return Gateway([source_of_server("near", "up"), source_of_server("far", "down", "connection refused")])

    async with live_server_async(make) as server:
        client = ApiClient(server.url)
        values = read_metrics((await client("GET", "/metrics")).text)
        health = (await client("GET", "/healthz")).json()
    assert (values["mtrl_server_up", "near"], values["mtrl_server_up", "far"]) == (1, 0)
    assert (values["mtrl_server_restarts_total", "far"], values["mtrl_server_processes", "far"]) == (3, 2)
    assert values["process_resident_memory_bytes",] > 2**20
    assert health["status"] == "degraded" and health["servers"]["far"]["reason"] == "connection refused"


async def test_calls_under_way_and_waiting_are_counted_by_server() -> None:
    hanging = HangingTool()
    source = source_of_server("near", "up", tool=FunctionTool(hanging.hang))
    async with live_server_async(lambda: Gateway([source])) as server, anyio.create_task_group() as tasks:
        client = ApiClient(server.url)
        id = await client.begin()
        for _ in range(3):
            tasks.start_soon(client.call, id, "hang")
        values: dict[tuple[str, ...], float] = {}
        with anyio.fail_after(PATIENCE_S):
            while values.get(("mtrl_calls_waiting", "near")) != 2:
                values = read_metrics((await client("GET", "/metrics")).text)
        assert values["mtrl_calls_running", "near"] == 1
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("states", "native", "expected"),
    [
        (["up", "up"], False, (200, "ok")),
        (["up", "down"], False, (200, "degraded")),
        (["down", "down"], False, (503, None)),
        (["down"], True, (200, "degraded")),
        ([], True, (200, "ok")),
    ],
)
async def test_gateway_is_ready_while_a_tool_can_be_called(
    states: list[State], native: bool, expected: tuple[int, str | None]
) -> None:
    sources = [source_of_server(f"server{number}", state) for number, state in enumerate(states)]
    if native:
        sources.append(Source("native", NativeToolset([FunctionTool(add)])))
    async with live_server_async(lambda: Gateway(sources)) as server:
        answer = await ApiClient(server.url)("GET", "/readyz")
    assert (answer.status_code, answer.json().get("status")) == expected


async def test_gateway_is_not_ready_while_servers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerStart, "names", ["slow"])
    async with live_server_async(lambda: Gateway(http_sources())) as server:
        answer = await ApiClient(server.url)("GET", "/readyz")
    assert answer.status_code == 503 and "starting" in answer.text

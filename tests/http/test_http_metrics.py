"""Tests of /metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.models import Limits
from gateway.gateway import Gateway
from gateway.http.metrics import OTHER, Metrics
from gateway.limits import LimitedToolset
from gateway.mcp_client.server_status import ServerLog, ServerStatus, State
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.session import ObservedCall
from gateway.tool_table import Source
from gateway.types import ToolCall, ToolResult, ToolSpec
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async
from tests.toolset_conformance.sample_tools import add


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


async def test_metrics_and_health_report_server_state() -> None:
    def backend(name: str, state: State, reason: str = "") -> SimpleNamespace:
        status = ServerStatus(name, state, reason, tools=1)
        return SimpleNamespace(name=name, log=ServerLog(), status=status, restart=lambda: None)

    def make() -> Gateway:
        limited = LimitedToolset(NativeToolset([FunctionTool(add)]), Limits())
        far = Source("far", NativeToolset([]), backend=backend("far", "down", "connection refused"))
        return Gateway([Source("near", limited, backend=backend("near", "up")), far])

    async with live_server_async(make) as server:
        client = ApiClient(server.url)
        values = read_metrics((await client("GET", "/metrics")).text)
        health = (await client("GET", "/healthz")).json()
    assert (values["mtrl_server_up", "near"], values["mtrl_server_up", "far"]) == (1, 0)
    assert health["status"] == "degraded" and health["servers"]["far"]["reason"] == "connection refused"

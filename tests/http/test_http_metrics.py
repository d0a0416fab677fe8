"""/metrics: what happened, by tool and outcome, without a label that a policy made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config.models import Limits
from gateway.gateway import Gateway
from gateway.http.metrics import OTHER, Metrics
from gateway.limit import Limited
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.session import Observed
from gateway.table import Source
from gateway.types import Image, Outcome, Text, ToolCall, ToolResult, ToolSpec
from tests.doors.kit import add
from tests.http.rooms import Caller, rooms
from tests.served import served


def numbers(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_calls_are_counted_by_tool_and_outcome() -> None:
    async with served(lambda: Gateway(rooms())) as at:
        ask = Caller(at.url)
        id = await ask.begin(feedback="scripted")
        for name, arguments in (("add", '{"a": 1}'), ("add", '{"a": 2}'), ("add", "{}"), ("made", "{}"), ("up", "{}")):
            await ask.call(id, name, arguments)
        await ask("POST", f"/v1/sessions/{id}/feedback", {"messages": []})
        answer = await ask("GET", "/metrics")
        found = numbers(answer.text)
    assert answer.headers["content-type"].startswith("text/plain")
    assert found["mtrl_calls_total", "ok", "add"] == 2
    assert found["mtrl_calls_total", "invalid", "add"] == 1
    assert found["mtrl_calls_total", "invalid", "(unknown)"] == 2
    assert found["mtrl_call_seconds_count", "add"] == 3
    assert found["mtrl_result_bytes_count", "add"] == 3
    assert found["mtrl_feedback_turns_total", "ok"] == 1
    assert found["mtrl_sessions_open",] == 1
    assert "made" not in answer.text and id not in answer.text


async def test_phases_retries_and_cuts_are_counted() -> None:
    async with Gateway([]) as gateway:
        metrics = Metrics(gateway)
        timing = {"queue": 0.1, "connect": 0.2, "upstream": 0.3, "parse": 0.4, "another": 9.0}
        parts = (Text("four"), Image(b"12345678"))
        result = ToolResult(parts, Outcome.OK, attempts=3, metrics={"cut": 10}, elapsed_s=1.0, timing=timing)
        metrics.observe(Observed("s", ToolCall("c", "far"), ToolSpec("far"), result))
        found = numbers(metrics.text.decode())
    assert [found["mtrl_call_phase_seconds_sum", phase, "far"] for phase in timing if phase != "another"] == [
        *(0.1, 0.2, 0.3, 0.4)
    ]
    assert found["mtrl_call_retries_total", "far"] == 2 and found["mtrl_results_cut_total", "far"] == 1
    assert found["mtrl_result_bytes_sum", "far"] == 12 and found["mtrl_call_seconds_sum", "far"] == 1.0


async def test_tools_without_end_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.metrics.MOST_TOOLS", 3)
    async with Gateway([]) as gateway:
        metrics = Metrics(gateway)
        for place in range(8):
            spec = ToolSpec(f"tool{place}")
            metrics.observe(Observed("s", ToolCall("c", spec.name), spec, ToolResult()))
        found = numbers(metrics.text.decode())
    assert found["mtrl_calls_total", "ok", OTHER] == 5
    assert ("mtrl_calls_total", "ok", "tool3") not in found


async def test_servers_are_up_or_down_in_metrics_and_health() -> None:
    def state(name: str, state: str, reason: str = "") -> SimpleNamespace:
        status = SimpleNamespace(name=name, state=state, reason=reason, remedy="", tools=1, quarantined={})
        return SimpleNamespace(status=status)

    def make() -> Gateway:
        limited = Limited(NativeToolset([FunctionTool(add)]), Limits())
        far = Source("far", NativeToolset([]), leaf=state("far", "down", "connection refused"))
        return Gateway([Source("near", limited, leaf=state("near", "up")), far])

    async with served(make) as at:
        ask = Caller(at.url)
        found = numbers((await ask("GET", "/metrics")).text)
        health = (await ask("GET", "/healthz")).json()
    assert (found["mtrl_server_up", "near"], found["mtrl_server_up", "far"]) == (1, 0)
    assert health["status"] == "degraded" and health["servers"]["far"]["reason"] == "connection refused"


async def test_two_gateways_of_one_process_count_apart() -> None:
    async with Gateway([]) as one, Gateway([]) as other:
        first, second = Metrics(one), Metrics(other)
        first.observe(Observed("s", ToolCall("c", "a"), ToolSpec("a"), ToolResult()))
        assert b'tool="a"' in first.text and b'tool="a"' not in second.text

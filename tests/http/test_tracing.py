"""Tests of OpenTelemetry spans."""

from __future__ import annotations

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.gateway import Gateway
from gateway.http.app import build_app
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.settings import Settings
from gateway.tracing import Tracing, tracing
from tests.http.api_client import http_sources, tool_call

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def record_spans() -> tuple[str, dict[str, ReadableSpan]]:
    """A session's id, and the spans of a request with a successful and a failing call."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Tracing(provider)
    async with Gateway(http_sources()) as gateway:
        gateway.observers.append(traces.observe)
        transport = httpx2.ASGITransport(traces.wrap_app(build_app(gateway, Settings(), DisconnectWatcher())))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            id = (await http.post("/v1/sessions", json={})).json()["id"]
            body = {"tool_calls": [tool_call("add", '{"a": 1}'), tool_call("nothing", id="c2")]}
            await http.post(f"/v1/sessions/{id}/calls", json=body, headers={"traceparent": PARENT})
            await http.get("/nothing")
    return id, {span.name: span for span in exporter.get_finished_spans()}


async def test_call_spans_are_children_of_the_request_in_the_clients_trace() -> None:
    _, spans = await record_spans()
    request = spans["POST /v1/sessions/{id}/calls"]
    assert request.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert request.parent is not None and request.parent.span_id == 0xB7AD6B7169203331
    assert request.attributes is not None and request.attributes["http.response.status_code"] == 200
    call = spans["execute_tool add"]
    assert call.parent is not None and call.parent.span_id == request.context.span_id
    assert call.attributes is not None and call.attributes["mtrl.outcome"] == "ok"
    assert call.attributes["gen_ai.tool.call.id"] == "c1" and call.attributes["mtrl.attempts"] == 1
    assert call.start_time is not None and call.end_time is not None and call.start_time < call.end_time


async def test_spans_contain_no_session_id_and_no_arbitrary_path() -> None:
    id, spans = await record_spans()
    assert set(spans) == {
        *("POST /v1/sessions", "POST /v1/sessions/{id}/calls", "GET"),
        *("execute_tool add", "execute_tool (unknown)"),
    }
    assert not any(id in span.to_json() for span in spans.values())


async def test_configured_collector_enables_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) as traces:
        assert isinstance(traces, Tracing)

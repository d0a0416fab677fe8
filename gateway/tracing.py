"""OpenTelemetry spans for tool calls, joined to the client's trace. Nothing is imported unless tracing is configured.

Spans contain a digest of the session's id, because the id itself gives access to the session.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from anyio import move_on_after, to_thread

from gateway.errors import ConfigError
from gateway.session import ObservedCall
from gateway.types import Outcome

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_TIMEOUT_S = 5.0
_TRACE_HEADERS = (b"traceparent", b"tracestate")


class Tracing:
    """Append `observe` to a gateway's observers; `wrap_app` wraps its HTTP application to join a client's trace."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = provider.get_tracer("mtrl.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, observed: ObservedCall) -> None:
        """Adds a span for a finished call; its start time lies in the past."""
        ended_ns = time.time_ns()
        result = observed.result
        tool = "(unknown)" if observed.spec is None else observed.spec.name
        span = self._tracer.start_span(
            f"execute_tool {tool}",
            start_time=ended_ns - int(result.elapsed_s * 1e9),
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": tool,
                "gen_ai.tool.call.id": observed.call.id,
                "mtrl.outcome": result.outcome.value,
                "mtrl.attempts": result.attempts,
                "mtrl.session": sha256(observed.session_id.encode()).hexdigest()[:16],
                **{f"mtrl.{phase}_s": seconds for phase, seconds in result.timing.items()},
            },
        )
        if result.outcome is not Outcome.OK:
            span.set_status(self._api.StatusCode.ERROR, result.reason or result.outcome.value)
        span.end(ended_ns)

    def wrap_app(self, app: ASGIApp) -> ASGIApp:
        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            carried = {
                name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS
            }
            method, parent = scope["method"], self._propagator.extract(carried)
            with self._tracer.start_as_current_span(method, parent, self._api.SpanKind.SERVER) as span:

                async def sent(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        span.set_attribute("http.response.status_code", message["status"])
                    await send(message)

                span.set_attribute("http.request.method", method)
                await app(scope, receive, sent)
                if route := scope.get("route"):
                    span.update_name(f"{method} {route}")

        return traced


@asynccontextmanager
async def tracing(env: Mapping[str, str]) -> AsyncIterator[Tracing | None]:
    """Tracing to the collector configured in the environment; None if there is none."""
    if not any(env.get(switch) for switch in ENDPOINT_VARIABLES):
        yield None
        return
    provider = _make_provider()
    try:
        yield Tracing(provider)
    finally:
        with move_on_after(FLUSH_TIMEOUT_S, shield=True):
            await to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)


def _make_provider() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        remedy = f"pip install 'mtrl-rl[otel]', or unset {ENDPOINT_VARIABLES[0]}"
        raise ConfigError(
            f"{ENDPOINT_VARIABLES[0]} is set, but OpenTelemetry is not installed", remedy=remedy
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "mtrl-gateway"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider

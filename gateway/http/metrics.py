"""Numbers for Prometheus, in a registry of their own; a label never takes a value that a policy made up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.http.hosted import Hosted
from gateway.http.servers import states
from gateway.session import Observed
from gateway.types import Part, Resource, Text, ToolResult

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BYTES = tuple(float(4**power) for power in range(3, 13))
PHASES = ("queue", "connect", "upstream", "parse")
UNKNOWN, OTHER = "(unknown)", "(other)"
MOST_TOOLS = 1000
"""A server that renames its tools without end must not fill the memory with series."""


class Metrics:
    """Hears of every call; `text` is what a scrape gets."""

    def __init__(self, gateway: Hosted) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        made: dict[str, Any] = {"registry": self.registry}
        self._calls = Counter("mtrl_calls", "Calls by their outcome", ["tool", "outcome"], **made)
        self._phase = Histogram(
            "mtrl_call_phase_seconds", "Time of a call by phase", ["tool", "phase"], buckets=SECONDS, **made
        )
        self._seconds = Histogram("mtrl_call_seconds", "Time of a whole call", ["tool"], buckets=SECONDS, **made)
        self._bytes = Histogram("mtrl_result_bytes", "Size of a result", ["tool"], buckets=BYTES, **made)
        self._retries = Counter("mtrl_call_retries", "Further attempts at calls", ["tool"], **made)
        self._cuts = Counter("mtrl_results_cut", "Results cut to their limit", ["tool"], **made)
        self._turns = Counter("mtrl_feedback_turns", "Turns of interactions", ["outcome"], **made)
        sessions = Gauge("mtrl_sessions_open", "Open sessions", **made)
        sessions.set_function(lambda: len(gateway.sessions))
        self.registry.register(_Servers(gateway))
        self._tools: dict[str, _OfTool] = {}

    def observe(self, seen: Observed) -> None:
        self._of(UNKNOWN if seen.spec is None else seen.spec.name).count(seen.result)

    def turn(self, outcome: str) -> None:
        self._turns.labels(outcome).inc()

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _of(self, tool: str) -> _OfTool:
        found = self._tools.get(tool)
        if found is None:
            tool = tool if len(self._tools) < MOST_TOOLS else OTHER
            found = self._tools.setdefault(tool, _OfTool(self, tool))
        return found


class _OfTool:
    """The series of one tool, found once: looking labels up costs more than counting."""

    def __init__(self, metrics: Metrics, tool: str) -> None:
        self._metrics, self._tool = metrics, tool
        self._outcomes: dict[str, Counter] = {}
        self._phases = {phase: metrics._phase.labels(tool, phase) for phase in PHASES}
        self._seconds, self._bytes = metrics._seconds.labels(tool), metrics._bytes.labels(tool)
        self._retries, self._cuts = metrics._retries.labels(tool), metrics._cuts.labels(tool)

    def count(self, result: ToolResult) -> None:
        outcome = result.outcome
        if outcome not in self._outcomes:
            self._outcomes[outcome] = self._metrics._calls.labels(self._tool, outcome.value)
        self._outcomes[outcome].inc()
        self._seconds.observe(result.elapsed_s)
        self._bytes.observe(sum(map(weight, result.parts)))
        for phase, seconds in result.timing.items():
            if phase in self._phases:
                self._phases[phase].observe(seconds)
        if result.attempts > 1:
            self._retries.inc(result.attempts - 1)
        if "cut" in result.metrics:
            self._cuts.inc()


class _Servers(Collector):
    """Asked at each scrape, since servers come and go with the configuration."""

    def __init__(self, gateway: Hosted) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [GaugeMetricFamily("mtrl_server_up", "Whether a server answers", labels=["server"])]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("mtrl_server_up", "Whether a server answers", labels=["server"])
        for state in states(self._gateway):
            family.add_metric([state.name], float(state.state == "up"))
        return [family]


def weight(part: Part) -> int:
    """Bytes of a part; for text its characters, since counting encoded bytes would cost a copy."""
    if isinstance(part, Text):
        return len(part.text)
    if isinstance(part, Resource):
        return len(part.text or "") + len(part.data or b"")
    return len(part.data)

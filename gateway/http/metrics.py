"""Prometheus metrics of the gateway. Labels never contain names that a policy made up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from gateway.http.served_gateway import ServedGateway, restartable_servers
from gateway.limits import count_calls
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.session import ObservedCall
from gateway.types import Part, Resource, Text, ToolResult

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BYTES = tuple(float(4**power) for power in range(3, 13))
PHASES = ("queue", "connect", "upstream", "parse")
UNKNOWN, OTHER = "(unknown)", "(other)"
MAX_TOOLS = 1000
"""Tools with series of their own; further ones share `(other)`, in case a server keeps renaming its tools."""


class Metrics:
    """An observer of the gateway that counts calls; `text` is the scrape response."""

    def __init__(self, gateway: ServedGateway) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        common: dict[str, Any] = {"registry": self.registry}
        self._calls = Counter("mtrl_calls", "Tool calls by outcome", ["tool", "outcome"], **common)
        self._phase = Histogram(
            "mtrl_call_phase_seconds", "Time of a tool call by phase", ["tool", "phase"], buckets=SECONDS, **common
        )
        self._seconds = Histogram("mtrl_call_seconds", "Total time of a tool call", ["tool"], buckets=SECONDS, **common)
        self._bytes = Histogram("mtrl_result_bytes", "Size of a result", ["tool"], buckets=BYTES, **common)
        self._retries = Counter("mtrl_call_retries", "Retries of tool calls", ["tool"], **common)
        self._cuts = Counter("mtrl_results_cut", "Results truncated to their limit", ["tool"], **common)
        self._turns = Counter("mtrl_feedback_turns", "Feedback turns by outcome", ["outcome"], **common)
        blocked = Histogram(
            "mtrl_loop_blocked_seconds", "Times in which the event loop was held", buckets=SECONDS, **common
        )
        gateway.loop_watchdog.listeners.append(blocked.observe)
        sessions = Gauge("mtrl_sessions_open", "Open sessions", **common)
        sessions.set_function(lambda: len(gateway.sessions))
        ProcessCollector(registry=self.registry)
        self.registry.register(_ServerCollector(gateway))
        self.registry.register(_SandboxCollector())
        self._tools: dict[str, _ToolSeries] = {}

    def observe(self, observed: ObservedCall) -> None:
        self._series_of(UNKNOWN if observed.spec is None else observed.spec.name).count(observed.result)

    def count_feedback_turn(self, outcome: str) -> None:
        self._turns.labels(outcome).inc()

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _series_of(self, tool: str) -> _ToolSeries:
        series = self._tools.get(tool)
        if series is None:
            tool = tool if len(self._tools) < MAX_TOOLS else OTHER
            series = self._tools.setdefault(tool, _ToolSeries(self, tool))
        return series


class _ToolSeries:
    """The series of one tool, looked up once, because looking up labels costs more than counting."""

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
        self._bytes.observe(sum(map(part_size, result.parts)))
        for phase, seconds in result.timing.items():
            if phase in self._phases:
                self._phases[phase].observe(seconds)
        if result.attempts > 1:
            self._retries.inc(result.attempts - 1)
        if "cut" in result.metrics:
            self._cuts.inc()


class _ServerCollector(Collector):
    """Collects the metrics of servers at each scrape, since servers come and go with the configuration."""

    def __init__(self, gateway: ServedGateway) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[Metric]:
        return _server_families()

    def collect(self) -> Iterable[Metric]:
        up, restarts, processes, running, waiting, cut = families = _server_families()
        for status in (server.status for server in restartable_servers(self._gateway)):
            up.add_metric([status.name], float(status.state == "up"))
            restarts.add_metric([status.name], status.reconnects)
            processes.add_metric([status.name], len(status.children))
            for reason, count in status.cuts.items():
                cut.add_metric([status.name, reason], count)
        loads: dict[str, tuple[int, int]] = {}
        for source in self._gateway.sources:
            under_way, queued = loads.get(source.name, (0, 0))
            more = count_calls(source.toolset)
            loads[source.name] = under_way + more[0], queued + more[1]
        for name, (under_way, queued) in loads.items():
            running.add_metric([name], under_way)
            waiting.add_metric([name], queued)
        return families


def _server_families() -> tuple[GaugeMetricFamily | CounterMetricFamily, ...]:
    cut_text = "Connections to a server that were cut because it sent without end, by reason"
    return (
        GaugeMetricFamily("mtrl_server_up", "Whether a server answers", labels=["server"]),
        CounterMetricFamily(
            "mtrl_server_restarts", "Times that a lost server was started or connected to again", labels=["server"]
        ),
        GaugeMetricFamily("mtrl_server_processes", "Child processes of a server", labels=["server"]),
        GaugeMetricFamily(
            "mtrl_calls_running", "Calls under way; native tools have no name of a server", labels=["server"]
        ),
        GaugeMetricFamily("mtrl_calls_waiting", "Calls that wait for others of their tool", labels=["server"]),
        CounterMetricFamily("mtrl_mcp_connections_cut", cut_text, labels=["server", "reason"]),
    )


class _SandboxCollector(Collector):
    """Collects the counts of sandboxes in this process."""

    def collect(self) -> Iterable[Metric]:
        limits = CounterMetricFamily("mtrl_sandbox_limits_hit", "Limits of sandboxes that were hit", labels=["limit"])
        for limit, count in STATISTICS.limits_hit.items():
            limits.add_metric([limit], count)
        grades = CounterMetricFamily("mtrl_sandbox_grades", "How sandboxes were graded", labels=["kind"])
        for kind, count in STATISTICS.grades.items():
            grades.add_metric([kind], count)
        starts = SummaryMetricFamily("mtrl_sandbox_start_seconds", "Starts of sandboxes, and the time they took")
        starts.add_metric([], STATISTICS.starts, STATISTICS.start_s)
        text = "Sandboxes without a control group: their limits hold for each process"
        groupless = CounterMetricFamily("mtrl_sandboxes_without_group", text, value=STATISTICS.without_group)
        refusals = CounterMetricFamily("mtrl_sandbox_refusals", "Sandboxes that could not be started")
        refusals.add_metric([], STATISTICS.refusals)
        running = GaugeMetricFamily("mtrl_sandboxes", "Sandboxes that run, by machine", labels=["machine"])
        for machine, count in {"": STATISTICS.running - STATISTICS.machines.total(), **STATISTICS.machines}.items():
            running.add_metric([machine], count)
        return starts, running, refusals, groupless, limits, grades


def part_size(part: Part) -> int:
    """Size of a part in bytes; for text in characters, because encoding it would cost a copy."""
    if isinstance(part, Text):
        return len(part.text)
    if isinstance(part, Resource):
        return len(part.text or "") + len(part.data or b"")
    return len(part.data)

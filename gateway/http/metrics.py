"""Prometheus metrics of the gateway. Labels never contain names that a policy made up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.gateway import Gateway
from gateway.limits import count_calls
from gateway.mcp_client.mcp_toolset import mcp_servers
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.session import ObservedCall
from gateway.types import Outcome, Part, Resource, Text, ToolResult

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BYTES = tuple(float(4**power) for power in range(3, 13))
PHASES = ("queue", "connect", "upstream", "parse")
UNKNOWN, OTHER = "(unknown)", "(other)"
MAX_TOOLS = 1000
"""Tools with series of their own; further ones share `(other)`, in case a server keeps renaming its tools."""


class Metrics(Collector):
    """An observer of the gateway that counts calls; `text` is the scrape response."""

    def __init__(self, gateway: Gateway) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._tools: dict[str, _ToolCounts] = {}
        self.registry.register(self)
        common: dict[str, Any] = {"registry": self.registry}
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

    def observe(self, observed: ObservedCall) -> None:
        tool = UNKNOWN if observed.spec is None else observed.spec.name
        counts = self._tools.get(tool)
        if counts is None:
            counts = self._tools.setdefault(tool if len(self._tools) < MAX_TOOLS else OTHER, _ToolCounts())
        counts.add(observed.result)

    def count_feedback_turn(self, outcome: str) -> None:
        self._turns.labels(outcome).inc()

    @property
    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily("mtrl_calls", "Tool calls by outcome", labels=["tool", "outcome"])
        phases = HistogramMetricFamily(
            "mtrl_call_phase_seconds", "Time of a tool call by phase", labels=["tool", "phase"]
        )
        seconds = HistogramMetricFamily("mtrl_call_seconds", "Total time of a tool call", labels=["tool"])
        sizes = HistogramMetricFamily("mtrl_result_bytes", "Size of a result", labels=["tool"])
        retries = CounterMetricFamily("mtrl_call_retries", "Retries of tool calls", labels=["tool"])
        cuts = CounterMetricFamily("mtrl_results_cut", "Results truncated to their limit", labels=["tool"])
        for tool, counts in list(self._tools.items()):
            for outcome, count in list(counts.outcomes.items()):
                calls.add_metric([tool, outcome.value], count)
            for phase, spread in counts.phases.items():
                spread.add_to(phases, tool, phase)
            counts.seconds.add_to(seconds, tool)
            counts.bytes.add_to(sizes, tool)
            retries.add_metric([tool], counts.retries)
            cuts.add_metric([tool], counts.cuts)
        return calls, phases, seconds, sizes, retries, cuts


class _ToolCounts:
    """What is counted of one tool, as plain numbers: `prometheus_client` would take a quarter of the time of a call."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = {}
        self.phases = {phase: _Spread(SECONDS) for phase in PHASES}
        self.seconds, self.bytes = _Spread(SECONDS), _Spread(BYTES)
        self.retries = self.cuts = 0

    def add(self, result: ToolResult) -> None:
        self.outcomes[result.outcome] = self.outcomes.get(result.outcome, 0) + 1
        self.seconds.add(result.elapsed_s)
        self.bytes.add(sum(map(part_size, result.parts)))
        for phase, seconds in result.timing.items():
            if phase in self.phases:
                self.phases[phase].add(seconds)
        self.retries += max(0, result.attempts - 1)
        self.cuts += "cut" in result.metrics


class _Spread:
    """Counts of values between bounds, for a histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        names = map(floatToGoString, (*self._bounds, math.inf))
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class _ServerCollector(Collector):
    """Collects the metrics of servers at each scrape, since servers come and go with the configuration."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[Metric]:
        return _server_families()

    def collect(self) -> Iterable[Metric]:
        up, restarts, processes, running, waiting, cut = families = _server_families()
        for status in (server.status for server in mcp_servers(self._gateway.sources)):
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

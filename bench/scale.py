"""Many sessions on one gateway: waves of concurrent calls, and how long calls take beside sessions that wait.

In a wave the tool answers only when all calls have arrived, so that they really are concurrent; it counts every token.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import load_generator
from measured_process import MeasuredProcess
from peers import Peer
from rows import process_commands, process_env

CONNECTIONS = (1, 64, 512)
"""In this order, beside the sessions that wait."""
LATENCY_CALLS = 4000
WARM_UP_SESSIONS = 50
"""Opened and closed first, so that what is loaded once is not counted as a session's memory."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Concurrent calls through one tool, and what became of them."""

    tool: str
    calls: int
    answered: int
    """Calls whose own token came back."""
    lost: int
    """Tokens that the tool never received."""
    duplicated: int
    """Tokens that the tool received more than once."""
    wall_s: float
    cpu_ms: float
    """Per call."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long calls took over a number of connections, each with one call under way at any time."""

    connections: int
    calls: int
    right: int
    median_ms: float
    p99_ms: float
    most_ms: float


@dataclass(frozen=True, slots=True)
class Scale:
    """Costs of many sessions on one gateway process."""

    sessions: int
    idle_kib: float
    """Memory of one idle session."""
    peak_mib: float
    """Memory of the process after all waves."""
    open_ms: float
    close_ms: float
    """Of one session, over one connection."""
    left_open: int
    waves: tuple[Wave, ...]
    waiting: int
    """Sessions that are open beside those of `latencies`."""
    latencies: tuple[Latency, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


def measure_scale(echo_url: str, sessions: int, calls_each: int, waiting: int) -> Scale:
    """Runs waves of one message per session, each with several calls; then measures calls beside waiting sessions."""
    command = process_commands(echo_url, Peer("FastMCP", problem="not needed"))["ours"]
    gateway = MeasuredProcess("ours", command, process_env(echo_url))
    try:
        return _measure_scale(gateway, sessions, calls_each, waiting)
    finally:
        gateway.stop()


def _measure_scale(gateway: MeasuredProcess, sessions: int, calls_each: int, waiting: int) -> Scale:
    url = gateway.url
    connection = HTTPConnection(urlsplit(url).netloc, timeout=load_generator.TIMEOUT_S)
    for tool in ("echo", "stdio_echo"):
        warm = _open_sessions(connection, WARM_UP_SESSIONS)[0]
        templates = [load_generator.gateway_call(url, session, tool) for session in warm]
        load_generator.run_load(url, templates, 2 * WARM_UP_SESSIONS)
        _close_sessions(connection, warm)
    before = gateway.rss_bytes
    opened, open_s = _open_sessions(connection, sessions)
    idle = gateway.rss_bytes - before
    waves = tuple(_run_wave(gateway, opened, calls_each, prefix) for prefix in ("", "stdio_"))
    peak = gateway.rss_bytes
    close_s = _close_sessions(connection, opened)
    latencies = _measure_latencies(gateway, connection, waiting)
    left_open = load_generator.request_json(url, "GET", "/healthz")["sessions"]
    return Scale(
        sessions=sessions,
        idle_kib=idle / 1024 / sessions,
        peak_mib=peak / 2**20,
        open_ms=1000 * open_s / sessions,
        close_ms=1000 * close_s / sessions,
        left_open=left_open,
        waves=waves,
        waiting=waiting,
        latencies=latencies,
    )


def _measure_latencies(gateway: MeasuredProcess, connection: HTTPConnection, waiting: int) -> tuple[Latency, ...]:
    opened = _open_sessions(connection, waiting)[0]
    latencies = []
    for connections in CONNECTIONS:
        templates = [load_generator.gateway_call(gateway.url, session, "echo") for session in opened[:connections]]
        load = load_generator.run_load(gateway.url, templates, LATENCY_CALLS)
        seconds = sorted(load.seconds)
        median_ms, p99_ms, most_ms = (1000 * seconds[int(len(seconds) * part)] for part in (0.5, 0.99, 0.999999))
        latencies.append(Latency(connections, len(seconds), load.right, median_ms, p99_ms, most_ms))
    _close_sessions(connection, opened)
    return tuple(latencies)


def _open_sessions(connection: HTTPConnection, count: int) -> tuple[list[str], float]:
    began = time.perf_counter()
    ids = [_request(connection, "POST", "/v1/sessions", {})["id"] for _ in range(count)]
    return ids, time.perf_counter() - began


def _close_sessions(connection: HTTPConnection, sessions: list[str]) -> float:
    began = time.perf_counter()
    for session in sessions:
        _request(connection, "DELETE", f"/v1/sessions/{session}")
    return time.perf_counter() - began


def _request(connection: HTTPConnection, method: str, path: str, body: Any = None) -> Any:
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return json.loads(connection.getresponse().read())


def _run_wave(gateway: MeasuredProcess, sessions: list[str], calls_each: int, prefix: str) -> Wave:
    calls = len(sessions) * calls_each
    tokens = [[f"{prefix}{session:05d}-{call}" for call in range(calls_each)] for session in range(len(sessions))]
    url, tool = gateway.url, f"{prefix}hold"
    requests = [_build_message(url, session, tool, own, calls) for session, own in zip(sessions, tokens, strict=True)]
    cpu_s, began = gateway.cpu_s, time.perf_counter()
    responses = load_generator.send_all(url, requests)
    wall_s, cpu_s = time.perf_counter() - began, gateway.cpu_s - cpu_s
    answered = sum(_count_right(response, own) for response, own in zip(responses, tokens, strict=True))
    received = _read_token_counts(url, sessions[0], f"{prefix}seen")
    return Wave(
        tool=tool,
        calls=calls,
        answered=answered,
        lost=sum(token not in received for own in tokens for token in own),
        duplicated=sum(times > 1 for times in received.values()),
        wall_s=wall_s,
        cpu_ms=1000 * cpu_s / calls,
    )


def _build_message(url: str, session: str, tool: str, tokens: list[str], wave_calls: int) -> bytes:
    calls = [_tool_call(token, tool, {"token": token, "among": wave_calls}) for token in tokens]
    return load_generator.build_post(url, f"/v1/sessions/{session}/calls", {"tool_calls": calls})


def _tool_call(id: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


def _count_right(response: bytes, tokens: list[str]) -> int:
    """How many calls of a message were answered in order with their own token."""
    messages = json.loads(response.partition(b"\r\n\r\n")[2]).get("messages", [])
    answers = [(message["tool_call_id"], message["content"]) for message in messages]
    return sum(answer == (token, token) for answer, token in zip(answers, tokens, strict=False))


def _read_token_counts(url: str, session: str, tool: str) -> dict[str, int]:
    body = {"tool_calls": [_tool_call("seen", tool, {})]}
    response = load_generator.request_json(url, "POST", f"/v1/sessions/{session}/calls", body)
    counts: dict[str, int] = json.loads(response["messages"][0]["content"])
    return counts

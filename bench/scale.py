"""Many rollouts at once: every call under way at the same moment, and each answered once, to the one who asked.

The tool answers nobody before all calls are there, so that they really are at once; it counts every token.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import load
from peers import Peer
from process import Measured
from rows import commands, environment

WARM = 50
"""Sessions opened and closed first, so that what is loaded once is not counted as theirs."""


@dataclass(frozen=True, slots=True)
class Together:
    """One wave of calls: how many, and what became of them."""

    tool: str
    calls: int
    answered: int
    """Calls whose own token came back in their own place."""
    lost: int
    duplicated: int
    """Tokens that the tool saw never, and more than once."""
    wall_s: float
    cpu_ms: float
    """Per call."""


@dataclass(frozen=True, slots=True)
class Scale:
    sessions: int
    idle_kib: float
    """Memory of one idle session."""
    peak_mib: float
    """Memory of the process with all calls under way behind it."""
    open_ms: float
    close_ms: float
    """Of one session, over one connection."""
    left_open: int
    waves: tuple[Together, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


def scale(echo_url: str, sessions: int, each: int) -> Scale:
    """`sessions` sessions, each with one message of `each` calls under way, on one gateway process."""
    gateway = Measured("ours", commands(echo_url, Peer("FastMCP", problem="not asked"))["ours"], environment(echo_url))
    try:
        return _scale(gateway, sessions, each)
    finally:
        gateway.end()


def _scale(gateway: Measured, sessions: int, each: int) -> Scale:
    url = gateway.url
    desk = HTTPConnection(urlsplit(url).netloc, timeout=load.PATIENCE_S)
    for tool in ("echo", "stdio_echo"):
        warm = _opened(desk, WARM)[0]
        load.fire(url, [load.ours(url, one, tool) for one in warm], 2 * WARM)
        _close(desk, warm)
    before = gateway.rss_bytes
    opened, open_s = _opened(desk, sessions)
    idle = gateway.rss_bytes - before
    waves = tuple(_together(gateway, opened, each, prefix) for prefix in ("", "stdio_"))
    peak = gateway.rss_bytes
    close_s = _close(desk, opened)
    left = load.ask(url, "GET", "/healthz")["sessions"]
    return Scale(
        sessions=sessions,
        idle_kib=idle / 1024 / sessions,
        peak_mib=peak / 2**20,
        open_ms=1000 * open_s / sessions,
        close_ms=1000 * close_s / sessions,
        left_open=left,
        waves=waves,
    )


def _opened(desk: HTTPConnection, count: int) -> tuple[list[str], float]:
    began = time.perf_counter()
    return [_told(desk, "POST", "/v1/sessions", {})["id"] for _ in range(count)], time.perf_counter() - began


def _close(desk: HTTPConnection, sessions: list[str]) -> float:
    began = time.perf_counter()
    for session in sessions:
        _told(desk, "DELETE", f"/v1/sessions/{session}")
    return time.perf_counter() - began


def _told(desk: HTTPConnection, method: str, path: str, body: Any = None) -> Any:
    desk.request(method, path, None if body is None else json.dumps(body))
    return json.loads(desk.getresponse().read())


def _together(gateway: Measured, sessions: list[str], each: int, prefix: str) -> Together:
    calls = len(sessions) * each
    tokens = [[f"{prefix}{session:05d}-{call}" for call in range(each)] for session in range(len(sessions))]
    url, tool = gateway.url, f"{prefix}hold"
    requests = [_request(url, one, tool, mine, calls) for one, mine in zip(sessions, tokens, strict=True)]
    cpu_s, began = gateway.cpu_s, time.perf_counter()
    answers = load.together(url, requests)
    wall_s, cpu_s = time.perf_counter() - began, gateway.cpu_s - cpu_s
    answered = sum(_right(answer, mine) for answer, mine in zip(answers, tokens, strict=True))
    seen = _seen(url, sessions[0], f"{prefix}seen")
    return Together(
        tool=tool,
        calls=calls,
        answered=answered,
        lost=sum(token not in seen for mine in tokens for token in mine),
        duplicated=sum(times > 1 for times in seen.values()),
        wall_s=wall_s,
        cpu_ms=1000 * cpu_s / calls,
    )


def _request(url: str, session: str, tool: str, tokens: list[str], among: int) -> bytes:
    calls = [_call(token, tool, {"token": token, "among": among}) for token in tokens]
    return load.post(url, f"/v1/sessions/{session}/calls", {"tool_calls": calls})


def _call(id: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


def _right(answer: bytes, tokens: list[str]) -> int:
    """How many of a message's calls were answered, each in its place with what it sent."""
    messages = json.loads(answer.partition(b"\r\n\r\n")[2]).get("messages", [])
    said = [(message["tool_call_id"], message["content"]) for message in messages]
    return sum(one == (token, token) for one, token in zip(said, tokens, strict=False))


def _seen(url: str, session: str, tool: str) -> dict[str, int]:
    told = load.ask(url, "POST", f"/v1/sessions/{session}/calls", {"tool_calls": [_call("seen", tool, {})]})
    counted: dict[str, int] = json.loads(told["messages"][0]["content"])
    return counted

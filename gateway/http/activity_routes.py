"""The route /v1/live/calls: a stream of tool calls as they run and end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import anyio
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.activity import ActivityLog, Line
from gateway.http.exchange import Request
from gateway.http.state import AppState
from gateway.wire import dumps

POLL_S = 1.0
"""Interval at which the running calls are sent."""
PAUSE_S = 0.1
"""Pause between two updates: each looks at all sessions, and calls may end in every turn of the event loop."""
LINES_AT_ONCE = 50
"""Calls that are encoded before others get their turn."""
HEARTBEAT_S = 15.0
"""Silence after which an empty line is sent, so that no proxy closes the connection."""


async def stream_calls(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/live/calls."""
    return CallStream(app.activity)


class CallStream:
    """An endless response of JSON lines: recent calls, then calls as they end, and the running ones."""

    def __init__(self, activity: ActivityLog) -> None:
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._activity.subscribe() as calls:
            recent = [{"call": line} for line in self._activity.recent]
            await _send_lines(send, [*recent, {"running": self._activity.running}])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_updates, calls, send)
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                await self._activity.stopping.wait()
                tasks.cancel_scope.cancel()
        self._activity.drop_closed_subscribers()
        with anyio.CancelScope(shield=True), anyio.move_on_after(POLL_S):
            await send({"type": "http.response.body", "body": b""})

    async def _send_updates(self, calls: MemoryObjectReceiveStream[Line], send: Send) -> None:
        had_running, sent_at = False, time.monotonic()
        while True:
            lines: list[Line] = []
            with anyio.move_on_after(POLL_S):
                lines.append({"call": await calls.receive()})
                while calls.statistics().current_buffer_used:
                    lines.append({"call": calls.receive_nowait()})
            if (running := self._activity.running) or had_running:
                lines.append({"running": running})
            had_running = bool(running)
            if lines or time.monotonic() - sent_at > HEARTBEAT_S:
                sent_at = time.monotonic()
                await _send_lines(send, lines)
                await anyio.sleep(PAUSE_S)


async def _send_lines(send: Send, lines: Sequence[Line]) -> None:
    """Sends JSON lines; without any, an empty one."""
    for start in range(0, max(1, len(lines)), LINES_AT_ONCE):
        body = b"".join(dumps(line) + b"\n" for line in lines[start : start + LINES_AT_ONCE]) or b"\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await checkpoint()


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()

"""Routes under /v1/live: a stream of tool calls as they run and end, and the list of open sessions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

import anyio
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.activity import ActivityLog, Line, session_digest
from gateway.http.exchange import Request, built_response, json_response, session_not_found
from gateway.http.served_gateway import ServedSession
from gateway.http.state import AppState
from gateway.large_json import is_large
from gateway.wire import dumps

POLL_S = 1.0
"""Interval at which the running calls are sent."""
PAUSE_S = 0.1
"""Pause between two updates: each looks at all sessions, and calls may end in every turn of the event loop."""
LINES_AT_ONCE = 50
"""Calls that are encoded before others get their turn."""
SESSIONS_AT_ONCE = 20
"""Sessions that are listed before others get their turn."""
HEARTBEAT_S = 15.0
"""Silence after which an empty line is sent, so that no proxy closes the connection."""


async def stream_calls(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/live/calls."""
    return CallStream(app.activity)


async def list_sessions(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/live/sessions."""
    data: list[Line] = []
    for number, (id, session) in enumerate(list(app.gateway.sessions.items())):
        data.append(_session_to_json(id, session))
        if number % SESSIONS_AT_ONCE == 0:
            await checkpoint()
    return await built_response(lambda: {"object": "list", "data": data}, is_large=is_large(data))


async def close_session(app: AppState, request: Request) -> ASGIApp:
    """DELETE /v1/live/sessions/{id}: closes any session by its digest, even one that a rollout still uses."""
    digest = request.path_params["id"]
    for id, session in list(app.gateway.sessions.items()):
        if session_digest(id) == digest:
            await session.close()
            return json_response({"id": digest, "rewards": [asdict(reward) for reward in session.rewards]})
    raise session_not_found()


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


def _session_to_json(id: str, session: ServedSession) -> Line:
    task = session.task
    return {
        "id": session_digest(id),
        "task_id": task.id,
        "tools": [spec.name for spec in session.specs],
        "feedback": session.feedback_name,
        "calls": session.finished_calls,
        "running": [call.name for call in session.running],
        "rewards": [asdict(reward) for reward in session.rewards],
        "age_s": session.age_s,
        "expires_in_s": session.remaining_s,
    }

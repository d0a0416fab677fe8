"""What happens now, for whoever runs the gateway: calls as they end, calls that run, sessions by whichever door.

A session's id opens the session, so that it is known here by a digest alone, which opens nothing and can only close.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.asked import Asked
from gateway.http.hosted import Hosted, HostedSession
from gateway.http.reply import json_reply, no_session
from gateway.session import Observed
from gateway.types import Part, Text
from gateway.wire import dumps

if TYPE_CHECKING:
    from gateway.http.desk import Desk

PAST = 200
"""Calls that a watcher is told of when it comes."""
SHOWN = 2000
"""Characters of the arguments, and of the text, of a call that is watched."""
BEHIND = 1000
"""Calls that a slow watcher may be behind; what comes then it misses, and is told how much."""
TICK_S = 1.0
"""How often is looked which calls run."""
BEAT_S = 15.0

Line = dict[str, Any]


@lru_cache(maxsize=4096)
def digest(id: str) -> str:
    return sha256(id.encode()).hexdigest()[:16]


class Live:
    """Hears of every call, and tells those who watch."""

    def __init__(self, gateway: Hosted, over: anyio.Event) -> None:
        self.gateway = gateway
        self.over = over
        """Set when the server stops, so that no watcher keeps it waiting."""
        self.past: deque[Line] = deque(maxlen=PAST)
        self._watchers: dict[MemoryObjectSendStream[Line], int] = {}
        """With what each has missed."""

    def observe(self, seen: Observed) -> None:
        line = _call(seen)
        self.past.append(line)
        for watcher, missed in self._watchers.items():
            try:
                watcher.send_nowait(line | {"missed": missed} if missed else line)
                self._watchers[watcher] = 0
            except anyio.WouldBlock:
                self._watchers[watcher] = missed + 1

    def watch(self) -> MemoryObjectReceiveStream[Line]:
        told, watched = anyio.create_memory_object_stream[Line](BEHIND)
        self._watchers[told] = 0
        return watched

    def forget(self) -> None:
        """Those who no longer listen."""
        for watcher in [one for one in self._watchers if not one.statistics().open_receive_streams]:
            del self._watchers[watcher]
            watcher.close()

    @property
    def running(self) -> list[Line]:
        """The calls under way, the oldest first."""
        now = time.monotonic()
        found = [
            {"session": digest(id), "tool": call.name, "for_s": now - call.since}
            for id, session in self.gateway.sessions.items()
            for call in session.running
        ]
        return sorted(found, key=lambda line: -float(line["for_s"]))


async def calls(desk: Desk, asked: Asked) -> ASGIApp:
    return Told(desk.live)


async def sessions(desk: Desk, asked: Asked) -> ASGIApp:
    data = [_session(id, session) for id, session in desk.gateway.sessions.items()]
    return json_reply({"object": "list", "data": data})


async def close(desk: Desk, asked: Asked) -> ASGIApp:
    """An operator's act: it ends what a rollout still uses, whoever opened it."""
    wanted = asked.path["id"]
    for id, session in list(desk.gateway.sessions.items()):
        if digest(id) == wanted:
            await session.close()
            return json_reply({"id": wanted, "rewards": [asdict(one) for one in session.rewards]})
    raise no_session()


class Told:
    """An answer of JSON lines without an end."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._live.watch() as watched:
            past = b"".join(dumps({"call": line}) + b"\n" for line in self._live.past)
            await _send(send, past + dumps({"running": self._live.running}) + b"\n")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tell, watched, send)
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                await self._live.over.wait()
                tasks.cancel_scope.cancel()
        self._live.forget()
        with anyio.CancelScope(shield=True), anyio.move_on_after(TICK_S):
            await send({"type": "http.response.body", "body": b""})

    async def _tell(self, watched: MemoryObjectReceiveStream[Line], send: Send) -> None:
        ran, told_at = False, time.monotonic()
        while True:
            lines: list[Line] = []
            with anyio.move_on_after(TICK_S):
                lines.append({"call": await watched.receive()})
                while watched.statistics().current_buffer_used:
                    lines.append({"call": watched.receive_nowait()})
            if (running := self._live.running) or ran:
                lines.append({"running": running})
            ran = bool(running)
            if lines or time.monotonic() - told_at > BEAT_S:
                told_at = time.monotonic()
                await _send(send, b"".join(dumps(line) + b"\n" for line in lines) or b"\n")


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _call(seen: Observed) -> Line:
    result, call = seen.result, seen.call
    return {
        "at": time.time(),
        "session": digest(seen.session_id),
        "id": call.id[:SHOWN],
        "tool": call.name[:SHOWN],
        "known": seen.spec is not None,
        "arguments": call.arguments[:SHOWN],
        "outcome": result.outcome.value,
        "reason": result.reason,
        "elapsed_s": result.elapsed_s,
        "attempts": result.attempts,
        "timing": dict(result.timing),
        "reward": result.reward,
        "parts": [_part(part) for part in result.parts[:16]],
    }


def _part(part: Part) -> Line:
    """Text is cut, and of media there is only their kind: a watcher looks, and keeps nothing."""
    kind = type(part).__name__.lower()
    return {"type": kind, "text": part.text[:SHOWN]} if isinstance(part, Text) else {"type": kind, "mime": part.mime}


def _session(id: str, session: HostedSession) -> Line:
    task = session.task
    name = task.feedback or getattr(session.heard, "name", None)
    return {
        "id": digest(id),
        "task_id": task.id,
        "tools": [spec.name for spec in session.specs],
        "feedback": name if isinstance(name, str) else None,
        "calls": session.called,
        "running": [call.name for call in session.running],
        "rewards": [asdict(one) for one in session.rewards],
        "age_s": session.age_s,
        "expires_in_s": session.remaining_s,
    }

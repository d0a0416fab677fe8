"""Recent and running tool calls of the gateway, for the web UI and other subscribers.

Sessions appear here by a digest of their id, because the id itself gives access to the session.
"""

from __future__ import annotations

import time
from collections import deque
from functools import lru_cache
from hashlib import sha256
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from gateway.gateway import Gateway
from gateway.session import ObservedCall
from gateway.types import Part, Text

HISTORY = 200
"""Recent calls that a new subscriber receives."""
MAX_CHARS = 2000
"""Characters shown of a call's arguments and of each text part of its result."""
MAX_BACKLOG = 1000
"""Calls queued for a slow subscriber; further ones are dropped and counted as `missed`."""

Line = dict[str, Any]


@lru_cache(maxsize=4096)
def session_digest(id: str) -> str:
    """The public name of a session: it identifies the session without giving access to it."""
    return sha256(id.encode()).hexdigest()[:16]


class ActivityLog:
    """An observer of the gateway that keeps recent calls and passes each finished call to its subscribers."""

    def __init__(self, gateway: Gateway, stopping: anyio.Event) -> None:
        self.gateway = gateway
        self.stopping = stopping
        """Set when the server stops; endless responses then end."""
        self.recent: deque[Line] = deque(maxlen=HISTORY)
        self._subscribers: dict[MemoryObjectSendStream[Line], int] = {}
        """Each with the number of calls it has missed."""

    def observe(self, observed: ObservedCall) -> None:
        line = _call_to_json(observed)
        self.recent.append(line)
        for subscriber, missed in self._subscribers.items():
            try:
                subscriber.send_nowait(line | {"missed": missed} if missed else line)
                self._subscribers[subscriber] = 0
            except anyio.WouldBlock:
                self._subscribers[subscriber] = missed + 1

    def subscribe(self) -> MemoryObjectReceiveStream[Line]:
        send, receive = anyio.create_memory_object_stream[Line](MAX_BACKLOG)
        self._subscribers[send] = 0
        return receive

    def drop_closed_subscribers(self) -> None:
        """Removes the subscribers whose receiving end is closed."""
        for subscriber in [each for each in self._subscribers if not each.statistics().open_receive_streams]:
            del self._subscribers[subscriber]
            subscriber.close()

    @property
    def running(self) -> list[Line]:
        """The calls under way, oldest first."""
        now = time.monotonic()
        lines = [
            {"session": session_digest(id), "tool": call.name, "for_s": now - call.since}
            for id, session in self.gateway.sessions.items()
            for call in session.running
        ]
        return sorted(lines, key=lambda line: -float(line["for_s"]))


def _call_to_json(observed: ObservedCall) -> Line:
    result, call = observed.result, observed.call
    return {
        "at": time.time(),
        "session": session_digest(observed.session_id),
        "id": call.id[:MAX_CHARS],
        "tool": call.name[:MAX_CHARS],
        "known": observed.spec is not None,
        "arguments": call.arguments[:MAX_CHARS],
        "outcome": str(result.outcome),
        "reason": result.reason and result.reason[:MAX_CHARS],
        "elapsed_s": result.elapsed_s,
        "attempts": result.attempts,
        "timing": dict(result.timing),
        "reward": result.reward,
        "parts": [_part_to_json(part) for part in result.parts[:16]],
    }


def _part_to_json(part: Part) -> Line:
    """Shortens text and drops the data of media."""
    kind = type(part).__name__.lower()
    if isinstance(part, Text):
        return {"type": kind, "text": part.text[:MAX_CHARS]}
    return {"type": kind, "mime": part.mime}

"""Writes a turn as server-sent events while it is sampled; each protocol has a class of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gateway.wire import dumps
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyProblem, PolicyRequest, TurnDelta, TurnStart

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""


def write_event(value: Mapping[str, Any], event: str = "") -> bytes:
    """A server-sent event with JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + dumps(dict(value)) + b"\n\n"


class EventWriter(ABC):
    """The events of one answer: its beginning, what comes, and its end, with all that was not sent before."""

    def __init__(self, request: PolicyRequest) -> None:
        self.request = request
        self.sent = TurnDelta()
        """What was written of the turn."""

    @abstractmethod
    def begin(self, start: TurnStart) -> bytes:
        """The first events."""

    def add(self, delta: TurnDelta) -> bytes:
        """Reasoning, then content, that was added."""
        events = b""
        if delta.reasoning:
            events += self.write_reasoning(delta.reasoning)
        if delta.content:
            events += self.write_content(delta.content)
        self.sent = TurnDelta(self.sent.content + delta.content, self.sent.reasoning + delta.reasoning)
        return events

    def end(self, answer: PolicyAnswer) -> bytes:
        """The rest of the answer. Reasoning that came after content was begun follows it."""
        content = TurnDelta(content=answer.content[len(self.sent.content) :])
        reasoning = TurnDelta(reasoning=answer.reasoning[len(self.sent.reasoning) :])
        rest = (content, reasoning) if self.sent.content else (reasoning, content)
        return b"".join([*map(self.add, rest), self.write_end(answer)])

    @abstractmethod
    def write_reasoning(self, text: str) -> bytes:
        """More reasoning."""

    @abstractmethod
    def write_content(self, text: str) -> bytes:
        """More content."""

    @abstractmethod
    def write_end(self, answer: PolicyAnswer) -> bytes:
        """The calls and the last events."""

    @abstractmethod
    def fail(self, problem: PolicyProblem) -> bytes:
        """What went wrong after the answer had begun."""

"""A question is known by what was asked before it in its session, never by time, place or call id."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from gateway.plain import plain
from gateway.tape.lines import Line, task_line
from gateway.types import Audience, Json, Task, ToolCall


class Key(NamedTuple):
    """Where the answer to a question is found."""

    after: str
    """Digest of the task and of every question before this message's."""
    question: str
    nth: int
    """Equal questions of one message are told apart by their order."""


class History:
    """The questions of one session as one digest that grows with them: a call late in a session costs no more."""

    __slots__ = ("count", "digest")

    def __init__(self, task: Task) -> None:
        self.digest = task_digest(task_line(task))
        self.count = 0

    def keys(self, questions: Sequence[str]) -> list[Key]:
        """Questions of one message share what came before the message, so which is answered first does not matter."""
        seen: Counter[str] = Counter()
        keys = []
        for question in questions:
            keys.append(Key(self.digest, question, seen[question]))
            seen[question] += 1
        return keys

    def add(self, questions: Sequence[str]) -> None:
        for question in questions:
            self.digest = sha256((self.digest + question).encode()).hexdigest()
        self.count += len(questions)


def canonical(value: Json) -> str:
    """Equal values have equal text."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"))


def digest(value: Json) -> str:
    return sha256(canonical(value).encode()).hexdigest()


def task_digest(line: Line) -> str:
    """How long a session may live, and in which order its tools are named, says nothing about what it is asked."""
    tools = line["tools"] if line["tools"] is None else sorted(line["tools"])
    return digest({**line, "tools": tools, "ttl_s": None})


def called(call: ToolCall, audience: Audience) -> str:
    return digest(["call", call.name, meant(call.arguments), audience])


def told(messages: Sequence[Mapping[str, Any]]) -> str:
    return digest(["feedback", messages])


FINISH = digest(["finish"])


def meant(arguments: str) -> tuple[str, str]:
    """Arguments by their meaning where they are JSON, by their letters where they are not."""
    try:
        return "json", canonical(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return "text", arguments

"""A request to the policy in one form for all protocols, and the answer to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.types import EMPTY, ToolCall
from trainer.ledger import Message

FinishReason = Literal["stop", "length", "tool_calls"]
ProblemKind = Literal[
    "invalid_request", "unsupported", "context_length", "not_found", "unauthorized", "ended", "too_large", "unavailable"
]
STATUS: Mapping[str, int] = {
    "invalid_request": 400,
    "unsupported": 400,
    "context_length": 400,
    "unauthorized": 401,
    "not_found": 404,
    "ended": 410,
    "too_large": 413,
    "unavailable": 503,
}
"""The HTTP status of each kind of problem."""


class PolicyProblem(Exception):
    """A request that is not served; each protocol writes it in its own form."""

    def __init__(self, kind: ProblemKind, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param

    @property
    def status(self) -> int:
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """What an agent asks the policy."""

    messages: tuple[Message, ...]
    """The chat as templates take it."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI function schemas."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    parallel_calls: bool = True
    stream: bool = False
    logprobs: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """What only its own protocol needs for the answer."""


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """The policy's turn for the agent."""

    id: str
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_sequence: str | None = None
    """The stop string of the request that ended the turn."""
    tokens: tuple[tuple[str, float], ...] = ()
    """The text and the logprob of each sampled token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What is known before a turn is sampled."""

    id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What was added to a turn."""

    content: str = ""
    reasoning: str = ""


def require(condition: object, message: str, param: str) -> None:
    """Raises a problem with a field of the request unless the condition holds."""
    if not condition:
        raise PolicyProblem("invalid_request", message, param=param)


def refuse(condition: object, message: str, param: str) -> None:
    """Raises a problem if a field asks for what is not supported."""
    if condition:
        raise PolicyProblem("unsupported", message, param=param)

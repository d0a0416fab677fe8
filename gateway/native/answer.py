"""Whatever a native tool returns or raises is one result; nothing it returns is lost."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from pydantic import BaseModel

from gateway import errors
from gateway.errors import Unavailable
from gateway.media.admit import LOST
from gateway.media.take import is_heavy, take
from gateway.types import EMPTY, Outcome, Text, ToolResult


def answer(value: Any) -> ToolResult:
    """A result from a response, or from (response, reward) or (response, reward, metrics)."""
    if isinstance(value, ToolResult):
        return value
    response, reward, metrics = _taken_apart(value)
    if isinstance(response, ToolResult):
        return response
    parts, lost, told = take(response)
    structured = told if isinstance(response, Mapping | BaseModel) and not _speaks(response) else None
    return ToolResult(parts, structured=structured, reward=reward, metrics={**metrics, LOST: lost} if lost else metrics)


def is_slow(value: Any) -> bool:
    """Whether reading what a tool returned is work for a thread."""
    return is_heavy(_taken_apart(value)[0])


def _taken_apart(value: Any) -> tuple[Any, float | None, Mapping[str, Any]]:
    """A tuple is (response, reward[, metrics]) only where each stands at its place: (3, 4) is a value of its own."""
    if not isinstance(value, tuple) or not value or isinstance(value[0], Real):
        return value, None, EMPTY
    match value:
        case (response, Real() | None as reward) if not isinstance(reward, bool):
            return response, _number(reward), EMPTY
        case (response, Real() | None as reward, dict() | None as metrics) if not isinstance(reward, bool):
            return response, _number(reward), metrics or EMPTY
    return value, None, EMPTY


def _number(reward: Real | None) -> float | None:
    return None if reward is None else float(reward)


def _speaks(response: Any) -> bool:
    """A response with parts of its own, rather than structure."""
    return hasattr(response, "image") or (isinstance(response, Mapping) and "type" in response)


def failure(name: str, error: Exception) -> ToolResult:
    """What a tool raised, told apart: its own word, or the world behind it failing."""
    told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    reason = f"tool {name!r} raised {errors.told(error)}"
    if isinstance(error, Unavailable):
        return ToolResult((Text(f"The tool is not available: {error}"),), Outcome.UNAVAILABLE, reason=reason)
    if isinstance(error, TimeoutError):
        return ToolResult((Text("The tool waited in vain for what it needs."),), Outcome.TIMEOUT, reason=reason)
    if isinstance(error, ConnectionError):
        return ToolResult((Text("The tool lost its connection to what it needs."),), Outcome.UNKNOWN, reason=reason)
    return ToolResult((Text(f"Error: {told}"),), Outcome.ERROR, reason=reason)

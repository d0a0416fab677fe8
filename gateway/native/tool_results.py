"""Turns what a tool's function returns or raises into a `ToolResult`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from numbers import Real
from typing import Any

from pydantic import BaseModel

from gateway.errors import Unavailable, describe_exception, error_text, format_error
from gateway.large_json import is_large
from gateway.media.media_filter import REFUSED_METRIC
from gateway.media.to_parts import convert_value, is_heavy
from gateway.native.base import ToolResponse
from gateway.native.thread_pool import ThreadPool
from gateway.policy_text import repeatable
from gateway.types import EMPTY, Image, Outcome, Text, ToolResult
from gateway.wire import is_array

MAIN_THREAD_ONLY = "signal only works in main thread"
"""How Python begins the error of a function that sets a signal handler, as `signal.alarm` needs, in another thread."""


HEAVY_LENGTH = 262_144
"""Larger values are converted in a thread."""
_WRITABLE = frozenset({str, int, bool, type(None), bytes, Text, Image})
PLAIN_TYPES = frozenset({str, int, float, bool, type(None), bytes, Text, Image, ToolResult, ToolResponse})


def to_tool_result(value: Any, *, is_execute: bool = False) -> ToolResult:
    """The result for a tool's return value; raises TypeError for what cannot be written for the policy.

    That of a class's `execute` may be (response, reward) or (response, reward, metrics); that of a function only with a
    `ToolResponse`, since any other tuple may be data.
    """
    if isinstance(value, ToolResult):
        return value
    has_reward = is_execute or (isinstance(value, tuple) and value and isinstance(value[0], ToolResponse))
    response, reward, metrics = _split_reward(value) if has_reward else (value, None, EMPTY)
    if isinstance(response, ToolResult):
        return response
    if (problem := _find_unwritable(response)) is not None:
        raise TypeError(f"the tool returned {problem}")
    parts, refused, structured = convert_value(response)
    if not isinstance(response, Mapping | BaseModel) or _has_parts(response):
        structured = None
    metrics = {**metrics, REFUSED_METRIC: refused} if refused else metrics
    return ToolResult(parts, structured=structured, reward=reward, metrics=metrics)


def _find_unwritable(value: Any) -> str | None:
    """What in a value no text or JSON stands for; objects that write themselves (`__str__`) are fine."""
    kind = type(value)
    if kind in _WRITABLE or isinstance(value, str | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"the number {value}, which JSON does not have"
    if isinstance(value, Mapping):
        return next(filter(None, map(_find_unwritable, value.values())), None)
    if isinstance(value, list | tuple | set | frozenset):
        return next(filter(None, map(_find_unwritable, value)), None)
    if isinstance(value, Iterator | AsyncIterator | Awaitable):
        return f"a {kind.__name__}: return a list of its items"
    writes_itself = any(getattr(kind, name) is not getattr(object, name) for name in ("__repr__", "__str__"))
    if (callable(value) or not writes_itself) and not is_array(value):
        return f"an object of type {kind.__name__}: return text, JSON values, a dataclass or a pydantic model"
    return None


async def convert_result(threads: ThreadPool, value: Any, *, is_execute: bool = False) -> ToolResult:
    """Does what `to_tool_result` does, in a thread if it takes long or calls methods that users wrote."""
    if not converts_slowly(_split_reward(value)[0]):
        return to_tool_result(value, is_execute=is_execute)
    result: ToolResult = await threads.run(to_tool_result, value, is_execute=is_execute)
    return result


def converts_slowly(value: Any) -> bool:
    """Whether a value is large, or converting it encodes images, reads files, or calls methods that users wrote."""
    return is_large(value, HEAVY_LENGTH) or not is_plain(value) or is_heavy(value)


def _split_reward(value: Any) -> tuple[Any, float | None, Mapping[str, Any]]:
    """Splits (response, reward[, metrics]) if the types fit; other tuples, such as (3, 4), are the response."""
    if not isinstance(value, tuple) or not value or isinstance(value[0], Real):
        return value, None, EMPTY
    match value:
        case (response, Real() | None as reward) if not isinstance(reward, bool):
            return response, _to_float(reward), EMPTY
        case (response, Real() | None as reward, dict() | None as metrics) if not isinstance(reward, bool):
            return response, _to_float(reward), metrics or EMPTY
    return value, None, EMPTY


def is_plain(value: Any) -> bool:
    """Whether a value consists of our types and Python's own."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(is_plain, value))
    if kind is dict:
        return all(map(is_plain, value.values()))
    return kind in PLAIN_TYPES


def _to_float(reward: Real | None) -> float | None:
    return None if reward is None else float(reward)


def _has_parts(response: Any) -> bool:
    """Whether a response is a ToolResponse or a content part, rather than structured data."""
    return hasattr(response, "image") or (isinstance(response, Mapping) and "type" in response)


def exception_result(name: str, error: Exception) -> ToolResult:
    """The result for a tool's exception; only other errors than a failing dependency count as the tool's own."""
    reason = f"tool {name!r} raised {describe_exception(error)}"
    if isinstance(error, ValueError) and error_text(error).startswith(MAIN_THREAD_ONLY):
        text, remedy = "The tool is not available.", "write `run_in: process` in the tool's entry"
        return ToolResult((Text(text),), Outcome.UNAVAILABLE, reason=f"{reason}; tools run in threads; {remedy}")
    if isinstance(error, Unavailable):
        text = f"The tool is not available: {repeatable(error_text(error))}"
        return ToolResult((Text(text),), Outcome.UNAVAILABLE, reason=reason)
    if isinstance(error, TimeoutError):
        return ToolResult((Text("The tool timed out waiting for something it needs."),), Outcome.TIMEOUT, reason=reason)
    if isinstance(error, ConnectionError):
        return ToolResult((Text("The tool lost its connection to what it needs."),), Outcome.UNKNOWN, reason=reason)
    return ToolResult((Text(f"Error: {repeatable(format_error(error))}"),), Outcome.ERROR, reason=reason)


def invalid_arguments_result(error: ValueError) -> ToolResult:
    """The result for arguments that do not fit the function."""
    return ToolResult((Text(repeatable(str(error))),), Outcome.INVALID, reason="arguments do not fit the function")

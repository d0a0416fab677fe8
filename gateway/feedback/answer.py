"""What an interaction returns is read leniently where its meaning is plain, and refused by name where it is not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from gateway import errors
from gateway.errors import GatewayError
from gateway.feedback.base import BaseInteraction, Message
from gateway.native.thread import Threads
from gateway.native.toolset import accepted
from gateway.types import EMPTY, Feedback, Outcome, Text

REASON_CHARS = 500
"""More of an exception's text than this is noise, or somebody's data."""


class AnswerError(GatewayError):
    """An interaction returned something that is not a turn."""


async def ask(
    interaction: BaseInteraction, threads: Threads, instance_id: str, messages: list[Message], args: Mapping[str, Any]
) -> tuple[bool, Any, float, Mapping[str, Any]]:
    """One turn of an interaction, async or not: (done, said, score, metadata)."""
    who, generate = type(interaction).__name__, interaction.generate_response
    value = await threads.run(generate, instance_id, messages, **accepted(generate, dict(args)))
    done, said, score, metadata = split(value, who)
    if score is None:
        calculate = interaction.calculate_score
        score = as_score(await threads.run(calculate, *addressed(calculate, instance_id)), who)
    return done, said, score, metadata


def split(value: Any, who: str) -> tuple[bool, Any, float | None, Mapping[str, Any]]:
    """(done, said, score, metadata) of a documented turn, or of an older one that leaves out its end."""
    if not isinstance(value, tuple) or not 2 <= len(value) <= 4:
        shape = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise AnswerError(
            f"{who}.generate_response returned {shape}, not (should_terminate, response, score, metadata)"
        )
    done, said, score, metadata = (*value, None, None)[:4]
    if isinstance(done, str):
        raise AnswerError(f"{who}.generate_response returned {done!r} for should_terminate, not a bool")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise AnswerError(f"{who}.generate_response returned a {type(metadata).__name__} for metadata, not a dict")
    return bool(done), said, None if score is None else as_score(score, who), metadata or EMPTY


def as_score(value: Any, who: str) -> float:
    """Any finite number, numpy's and torch's included; a text is not one."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise AnswerError(f"{who} gave {value!r:.80} for a score, not a finite number")
    return score


def unheard(name: str, outcome: Outcome, reason: str) -> Feedback:
    """A turn that could not be had. It scores nothing, and the outcome says that it must not count."""
    return Feedback((Text(f"No feedback could be had from {name!r}."),), outcome=outcome, reason=reason)


def told(error: BaseException) -> str:
    return errors.told(error)[:REASON_CHARS]


def addressed(function: Callable[..., Any], instance_id: str) -> tuple[str, ...]:
    """The id, for a function that has room for one: the base class of verl's has none in its last two methods."""
    parameters = inspect.signature(function).parameters.values()
    return (instance_id,) if any(one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters) else ()

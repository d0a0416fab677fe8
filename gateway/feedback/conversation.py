"""One interaction in one rollout: starts it, takes turns under a deadline, and always finalizes it.

A turn that the interaction could not give is no failure of the policy: it has no score, and its outcome says so.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import anyio

from gateway.errors import GatewayError, SessionError, describe_exception, safe_repr
from gateway.feedback.base import BaseInteraction, Message
from gateway.media.media_filter import REFUSED_METRIC, MediaFilter
from gateway.media.to_parts import convert_value
from gateway.native.native_toolset import accepted_kwargs
from gateway.native.thread_pool import ThreadPool
from gateway.native.tool_results import converts_slowly, is_plain
from gateway.types import EMPTY, Feedback, Outcome, Text

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
"""An exception's text is cut to this length."""
CLOSE_TIMEOUT_S = 5.0
"""How long closing waits for a turn under way, and then for `finalize_interaction`."""

Counts = Counter[tuple[str, str]]
"""Number of events by (interaction, event): an outcome, or a failure to start, finalize or close."""


async def run_turn(
    interaction: BaseInteraction,
    threads: ThreadPool,
    instance_id: str,
    messages: list[Message],
    kwargs: Mapping[str, Any],
) -> tuple[bool, Any, float, Mapping[str, Any]]:
    """Calls an interaction, async or not; returns (done, reply, score, metadata)."""
    name, generate = type(interaction).__name__, interaction.generate_response
    value = await threads.run(generate, instance_id, messages, **accepted_kwargs(generate, dict(kwargs)))
    done, reply, score, metadata = (
        parse_turn(value, name) if is_plain(value) else await threads.run(parse_turn, value, name)
    )
    if score is None:
        calculate = interaction.calculate_score
        value = await threads.run(calculate, *instance_id_args(calculate, instance_id))
        score = parse_score(value, name) if is_plain(value) else await threads.run(parse_score, value, name)
    return done, reply, score, metadata


def parse_turn(value: Any, name: str) -> tuple[bool, Any, float | None, Mapping[str, Any]]:
    """(done, reply, score, metadata); the last two may be missing, as in older versions of the interface."""
    if not isinstance(value, tuple) or not 2 <= len(value) <= 4:
        shape = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise GatewayError(
            f"{name}.generate_response returned {shape}, not (should_terminate, response, score, metadata)"
        )
    done, reply, score, metadata = (*value, None, None)[:4]
    if isinstance(done, str):
        raise GatewayError(f"{name}.generate_response returned {done!r} for should_terminate, not a bool")
    if metadata is not None and not isinstance(metadata, Mapping):
        type_name = type(metadata).__name__
        raise GatewayError(f"{name}.generate_response returned a {type_name} for metadata, not a dict")
    return bool(done), reply, None if score is None else parse_score(score, name), metadata or EMPTY


def parse_score(value: Any, name: str) -> float:
    """A finite number, numpy's and torch's included, but no text."""
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # boundary: a user's object may raise anything when converted
        score = math.nan
    if not math.isfinite(score):
        raise GatewayError(f"{name} returned {safe_repr(value)} as a score, not a finite number")
    return score


def missing_feedback(name: str, outcome: Outcome, reason: str) -> Feedback:
    """A turn that the interaction could not give, without a score."""
    return Feedback((Text(f"No feedback from {name!r}."),), outcome=outcome, reason=reason)


def describe_failure(error: BaseException) -> str:
    """An exception in one short text."""
    return describe_exception(error)[:MAX_REASON_CHARS]


def instance_id_args(function: Callable[..., Any], instance_id: str) -> tuple[str, ...]:
    """The id, if the function takes a positional argument: the last two methods of verl's base class take none."""
    parameters = inspect.signature(function).parameters.values()
    takes_id = any(parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) for parameter in parameters)
    return (instance_id,) if takes_id else ()


class Conversation:
    """One interaction in one rollout. Turns run one at a time; any task may close it, as no cancel scope stays open."""

    def __init__(
        self,
        name: str,
        interaction: BaseInteraction,
        timeout_s: float,
        media_filter: MediaFilter,
        threads: ThreadPool,
        counts: Counts,
    ) -> None:
        self.name, self.interaction, self.timeout_s = name, interaction, timeout_s
        self._media_filter = media_filter
        self._threads, self._counts = threads, counts
        self._id = str(uuid4())
        self._args: Mapping[str, Any] = {}
        self._turn_lock = anyio.Lock()
        self._is_starting = self._is_started = self._is_closed = False

    async def open(self, args: Mapping[str, Any]) -> None:
        """Starts the interaction; raises SessionError if it cannot start within the deadline."""
        self._args = args
        with anyio.move_on_after(self.timeout_s):
            try:
                await self._start()
                return
            except Exception as error:  # boundary: the operator's code may raise anything
                raise SessionError(f"interaction {self.name!r} could not start: {describe_failure(error)}") from error
        raise SessionError(f"interaction {self.name!r} did not start within {self.timeout_s} s")

    async def take_turn(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """One turn within the deadline; an exception becomes feedback with the outcome `unavailable`."""
        reason = f"{self.name!r} gave no feedback within {self.timeout_s} s"
        feedback = missing_feedback(self.name, Outcome.TIMEOUT, reason)
        with anyio.move_on_after(self.timeout_s):
            try:
                async with self._turn_lock:
                    feedback = await self._run_turn([dict(message) for message in messages])
            except TimeoutError as error:
                feedback = missing_feedback(self.name, Outcome.TIMEOUT, describe_failure(error))
            except Exception as error:  # boundary: the operator's code failed, not the policy
                log.warning("interaction %r failed: %s", self.name, describe_failure(error))
                feedback = missing_feedback(self.name, Outcome.UNAVAILABLE, describe_failure(error))
        self._counts[self.name, feedback.outcome.value] += 1
        return feedback

    async def close(self) -> None:
        """Finalizes if `start_interaction` was called, even if it failed: it may have acquired something."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_starting:
            return
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            async with self._turn_lock:
                pass
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True) as scope:
            await self._finalize()
        if scope.cancelled_caught:
            self._counts[self.name, "finalize_failed"] += 1
            log.error("interaction %r was not finalized within %s s", self.name, CLOSE_TIMEOUT_S)

    async def _start(self) -> None:
        if self._is_closed:
            raise SessionError("the session is closed")
        if self._is_starting and not self._is_started:
            raise SessionError(f"interaction {self.name!r} failed to start before")
        if self._is_starting:
            return
        self._is_starting = True
        start = self.interaction.start_interaction
        # verl passes the interaction's name with the other arguments; here only a parameter `name` receives it.
        name_arg = {"name": self.name} if "name" in inspect.signature(start).parameters else {}
        try:
            own_id = await self._threads.run(start, self._id, **name_arg, **self._args)
        except Exception:
            self._counts[self.name, "start_failed"] += 1
            raise
        self._id = own_id if isinstance(own_id, str) else self._id
        self._is_started = True

    async def _run_turn(self, messages: list[dict[str, Any]]) -> Feedback:
        await self._start()
        done, reply, score, metadata = await run_turn(self.interaction, self._threads, self._id, messages, self._args)
        converted = await self._threads.run(convert_value, reply) if converts_slowly(reply) else convert_value(reply)
        parts, refused = await self._media_filter.filter_parts(converted.parts)
        refused += converted.refused
        return Feedback(parts, score, done, {**metadata, REFUSED_METRIC: refused} if refused else metadata)

    async def _finalize(self) -> None:
        try:
            finalize = self.interaction.finalize_interaction
            await self._threads.run(finalize, *instance_id_args(finalize, self._id))
        except Exception as error:  # boundary: the operator's code must not keep the session from closing
            if not self._is_started:
                # The interaction may not know a rollout whose start failed.
                log.debug("finalizing %r after a failed start: %s", self.name, describe_failure(error))
                return
            self._counts[self.name, "finalize_failed"] += 1
            log.exception("interaction %r could not be finalized", self.name)

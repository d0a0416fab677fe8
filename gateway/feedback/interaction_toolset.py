"""The toolset of feedback interactions: builds those that files declare, and offers each as `feedback_<name>`.

Only the training loop may call these tools.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
from pydantic import ValidationError

from gateway.config.entries import InteractionEntry
from gateway.config.load_object import load_object
from gateway.errors import ConfigError, ConfigErrors, SessionError, describe_exception
from gateway.feedback.base import BaseInteraction
from gateway.feedback.conversation import CLOSE_TIMEOUT_S, Conversation, Counts
from gateway.media.media_filter import MediaFilter
from gateway.native.thread_pool import ThreadPool
from gateway.schema import parse_arguments
from gateway.toolset import unknown_tool_result
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Feedback, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from gateway.user_code import UserCode

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
"""Deadline of one turn, unless the entry sets another."""
REQUIRED_METHODS = ("start_interaction", "generate_response", "finalize_interaction")
DEFAULT_INTERACTION = "gsm8k"
"""The interaction of a session that names none."""
MESSAGES_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "messages": {
            "type": "array",
            "description": "The chat so far, the policy's last turn included.",
            "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
        }
    },
    "required": ["messages"],
    "additionalProperties": False,
}


def build_interactions(
    entries: Iterable[InteractionEntry], load: Callable[[str, Path, str], Any] = load_object
) -> dict[str, BaseInteraction]:
    """The interactions by name, whose classes are loaded; raises ConfigError, or ConfigErrors for several mistakes."""
    interactions: dict[str, BaseInteraction] = {}
    mistakes: list[ConfigError] = []
    for entry in entries:
        try:
            interaction_class = load(entry.class_name, entry.file, f"{entry.field}.class_name")
            interactions[entry.name] = build_interaction(interaction_class, entry.config, entry.name, entry.owner)
        except ConfigError as error:
            mistakes.append(error)
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else ConfigErrors(mistakes)
    return interactions


def build_interaction(
    interaction_class: Callable[[dict[str, Any]], BaseInteraction],
    config: Mapping[str, Any],
    name: str,
    owner: str = "",
) -> BaseInteraction:
    """An interaction; `owner` is where it is declared, as `tool_configs/maths.yaml interaction[0]`."""
    missing = [method for method in REQUIRED_METHODS if not callable(getattr(interaction_class, method, None))]
    if missing:
        problem = f"interaction {name!r}: its class lacks {', '.join(missing)}"
        remedy = "derive it from gateway.feedback.base.BaseInteraction"
        raise ConfigError(problem, file=owner, field="class_name", remedy=remedy)
    try:
        with UserCode():
            return interaction_class({**config, "name": name})
    except ConfigError as error:
        # From an interaction that builds another one.
        problem, field = f"interaction {name!r}: {error.problem}", f"config.{error.field}".rstrip(".")
        raise ConfigError(problem, file=owner, field=field, remedy=error.remedy) from error
    except ValidationError as error:
        # Without the input, which may be an API key.
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"interaction {name!r}: {first['msg']}", file=owner, field=f"config.{path}") from None
    except Exception as error:  # boundary: an operator's class may raise anything over its configuration
        problem = f"interaction {name!r} cannot be built: {describe_exception(error)}"
        raise ConfigError(problem, file=owner, field="config") from error


class FeedbackToolset:
    """Interactions by name, each offered to the training loop as the tool `feedback_<name>`."""

    def __init__(
        self,
        interactions: Mapping[str, BaseInteraction],
        *,
        timeouts_s: Mapping[str, float] = EMPTY,
        owners: Mapping[str, str] = EMPTY,
        media_filters: Mapping[str, MediaFilter] = EMPTY,
    ) -> None:
        self.interactions = dict(interactions)
        self.timeouts_s = timeouts_s
        self.media_filters = {name: media_filters.get(name) or MediaFilter() for name in interactions}
        self.specs: Sequence[ToolSpec] = tuple(_make_spec(name, owners.get(name, "")) for name in interactions)
        self.threads = ThreadPool()
        self.counts: Counts = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for name, interaction in self.interactions.items():
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True) as scope:
                await self._close(name, interaction)
            if scope.cancelled_caught:
                log.error("interaction %r was not closed within %s s", name, CLOSE_TIMEOUT_S)

    async def _close(self, name: str, interaction: BaseInteraction) -> None:
        # A class derived from verl's base class has no such method.
        aclose = getattr(interaction, "aclose", None)
        try:
            if aclose is not None:
                await self.threads.run(aclose)
        except Exception:  # boundary: one interaction must not keep the others from closing
            self.counts[name, "close_failed"] += 1
            log.exception("interaction %r could not be closed", name)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[FeedbackSession]:
        name, args = self._choose_interaction(task)
        session = FeedbackSession(self, name, only_named=task.feedback is not None)
        try:
            if name is not None and (task.feedback or task.feedback_args):
                await session.conversation(name).open(args)
            yield session
        finally:
            await session.close()

    def _choose_interaction(self, task: Task) -> tuple[str | None, dict[str, Any]]:
        """The name of a session's interaction, and its arguments, among which verl's rows have the name."""
        args = dict(task.feedback_args)
        name_arg = args.pop("name", None)
        name = task.feedback or name_arg or self._default_name
        known = ", ".join(sorted(self.interactions)) or "none"
        if name is not None and name not in self.interactions:
            raise SessionError(f"there is no interaction named {name!r}; known: {known}")
        if name is None and task.feedback_args:
            raise SessionError(f"feedback arguments are given, but no interaction is named; known: {known}")
        reserved = sorted(args.keys() & {"instance_id", "messages"})
        if reserved:
            raise SessionError(f"feedback argument {reserved[0]!r} is reserved for the gateway; give it another name")
        return name, args

    @property
    def _default_name(self) -> str | None:
        """`gsm8k` if there is one, else the only interaction: older rows name none."""
        if DEFAULT_INTERACTION in self.interactions:
            return DEFAULT_INTERACTION
        return next(iter(self.interactions)) if len(self.interactions) == 1 else None


class FeedbackSession:
    """One rollout's interactions: the named one only, or all of them, each started when it is first called."""

    __slots__ = ("_closed", "_conversations", "_toolset", "name", "specs")

    def __init__(self, toolset: FeedbackToolset, name: str | None, *, only_named: bool) -> None:
        self._toolset, self.name = toolset, name
        self._closed = False
        self._conversations: dict[str, Conversation] = {}
        offered = [spec for spec in toolset.specs if not only_named or spec.name == _tool_name(name or "")]
        self.specs: Sequence[ToolSpec] = tuple(offered)

    def conversation(self, name: str) -> Conversation:
        """The conversation with one interaction, created when it is first needed."""
        if self._closed:
            raise SessionError("the session is closed")
        if name not in self._conversations:
            toolset = self._toolset
            self._conversations[name] = Conversation(
                name,
                toolset.interactions[name],
                toolset.timeouts_s.get(name, DEFAULT_TIMEOUT_S),
                toolset.media_filters[name],
                toolset.threads,
                toolset.counts,
            )
        return self._conversations[name]

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """One turn of the session's interaction."""
        if self.name is None:
            known = ", ".join(sorted(self._toolset.interactions)) or "none"
            raise SessionError(
                f"the session names no interaction, and there is no {DEFAULT_INTERACTION!r}; known: {known}"
            )
        return await self.conversation(self.name).take_turn(messages)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        if not any(spec.name == call.name for spec in self.specs):
            return unknown_tool_result(call.name, self.specs)
        try:
            messages = _parse_messages(call.arguments)
        except ValueError as error:
            return ToolResult((Text(str(error)),), Outcome.INVALID, reason="arguments do not fit the schema")
        feedback = await self.conversation(call.name.removeprefix(_tool_name(""))).take_turn(messages)
        reward = None if feedback.outcome.is_infrastructure else feedback.score
        return ToolResult(
            feedback.parts, feedback.outcome, reward, feedback.done, metrics=feedback.metadata, reason=feedback.reason
        )

    async def finish(self) -> Mapping[str, float]:
        """No rewards: every score was given with its turn."""
        return {}

    async def close(self) -> None:
        self._closed = True
        for conversation in self._conversations.values():
            await conversation.close()


def _tool_name(name: str) -> str:
    return f"feedback_{name}"


def _make_spec(name: str, owner: str) -> ToolSpec:
    description = f"Feedback of {name} on the policy's last turn, with its score."
    return ToolSpec(
        _tool_name(name), description, MESSAGES_SCHEMA, audience="loop", owner=owner or f"interaction {name!r}"
    )


def _parse_messages(arguments: str) -> list[dict[str, Any]]:
    value = parse_arguments(arguments)
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        raise ValueError("Give `messages`: an array of chat messages, each an object with a `role`.")
    return messages

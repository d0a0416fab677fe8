"""Feedback interactions are a toolset that only the training loop may call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio

from gateway.errors import SessionError
from gateway.feedback.base import BaseInteraction
from gateway.feedback.conversation import CLOSE_S, Conversation, Counts
from gateway.feedback.entry import TIMEOUT_S, Declared, build
from gateway.media.admit import Admission, Store
from gateway.native.thread import Threads
from gateway.schema import parse_object
from gateway.toolset import missing
from gateway.types import ALONE, EMPTY, Context, Feedback, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)

DEFAULT = "gsm8k"
"""The interaction of a session that names none."""
PARAMETERS: Mapping[str, Any] = {
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


class FeedbackToolset:
    """Interactions by name; each is offered as `feedback_<name>`."""

    def __init__(
        self,
        interactions: Mapping[str, BaseInteraction],
        *,
        timeouts_s: Mapping[str, float] = EMPTY,
        owners: Mapping[str, str] = EMPTY,
        admissions: Mapping[str, Admission] = EMPTY,
    ) -> None:
        self.interactions = dict(interactions)
        self.timeouts_s = timeouts_s
        self.admissions = {name: admissions.get(name) or Admission() for name in interactions}
        self.specs: Sequence[ToolSpec] = tuple(_spec(name, owners.get(name, "")) for name in interactions)
        self.threads = Threads()
        self.counts: Counts = Counter()

    @classmethod
    def from_entries(cls, entries: Iterable[Declared], store: Store | None = None) -> Self:
        """Builds every entry; raises `ConfigError` over those that cannot be, or that share a name."""
        entries = tuple(entries)
        timeouts_s = {entry.offered_name: entry.timeout_s for entry in entries}
        owners = {entry.offered_name: entry.owner for entry in entries}
        admissions = {entry.offered_name: Admission(entry.media, store) for entry in entries}
        return cls(build(entries), timeouts_s=timeouts_s, owners=owners, admissions=admissions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, interaction in self.interactions.items():
            with anyio.move_on_after(CLOSE_S, shield=True) as scope:
                await self._close(name, interaction)
            if scope.cancelled_caught:
                log.error("interaction %r was not closed within %s s", name, CLOSE_S)

    async def _close(self, name: str, interaction: BaseInteraction) -> None:
        # A class derived from verl's own base has no such method.
        aclose = getattr(interaction, "aclose", None)
        try:
            if aclose is not None:
                await self.threads.run(aclose)
        except Exception:  # boundary: one interaction must not keep the others from closing
            self.counts[name, "close_failed"] += 1
            log.exception("interaction %r could not be closed", name)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[FeedbackSession]:
        name, args = self._chosen(task)
        session = FeedbackSession(self, name, only=task.feedback is not None)
        try:
            if name is not None and (task.feedback or task.feedback_args):
                await session.conversation(name).open(args)
            yield session
        finally:
            await session.close()

    def _chosen(self, task: Task) -> tuple[str | None, dict[str, Any]]:
        """The interaction of a session, and its arguments, among which verl keeps the name."""
        args = dict(task.feedback_args)
        named = args.pop("name", None)
        name = task.feedback or named or self._default
        known = ", ".join(sorted(self.interactions)) or "none"
        if name is not None and name not in self.interactions:
            raise SessionError(f"there is no interaction named {name!r}; known: {known}")
        if name is None and task.feedback_args:
            raise SessionError(f"feedback arguments are given, but no interaction is named; known: {known}")
        taken = sorted(args.keys() & {"instance_id", "messages"})
        if taken:
            raise SessionError(f"feedback argument {taken[0]!r} is the gateway's own; give it another name")
        return name, args

    @property
    def _default(self) -> str | None:
        """`gsm8k`; or the only one there is, which rows from the time of single interactions do not name."""
        if DEFAULT in self.interactions:
            return DEFAULT
        return next(iter(self.interactions)) if len(self.interactions) == 1 else None


class FeedbackSession:
    """One rollout's interactions: the one it named, or else any, each of them started when it is first asked."""

    __slots__ = ("_closed", "_conversations", "_name", "_toolset", "specs")

    def __init__(self, toolset: FeedbackToolset, name: str | None, *, only: bool) -> None:
        self._toolset, self._name = toolset, name
        self._closed = False
        self._conversations: dict[str, Conversation] = {}
        kept = [spec for spec in toolset.specs if not only or spec.name == _offered(name or "")]
        self.specs: Sequence[ToolSpec] = tuple(kept)

    @property
    def name(self) -> str | None:
        """The interaction that answers."""
        return self._name

    def conversation(self, name: str) -> Conversation:
        if self._closed:
            raise SessionError("the session is closed")
        if name not in self._conversations:
            owner = self._toolset
            self._conversations[name] = Conversation(
                name,
                owner.interactions[name],
                owner.timeouts_s.get(name, TIMEOUT_S),
                owner.admissions[name],
                owner.threads,
                owner.counts,
            )
        return self._conversations[name]

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """One turn of the session's interaction."""
        if self._name is None:
            known = ", ".join(sorted(self._toolset.interactions)) or "none"
            raise SessionError(f"the session names no interaction, and there is no {DEFAULT!r}; known: {known}")
        return await self.conversation(self._name).turn(messages)

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        if not any(spec.name == call.name for spec in self.specs):
            return missing(call.name, self.specs)
        try:
            messages = _messages(call.arguments)
        except ValueError as error:
            return ToolResult((Text(str(error)),), Outcome.INVALID, reason="arguments do not fit the schema")
        heard = await self.conversation(call.name.removeprefix(_offered(""))).turn(messages)
        reward = None if heard.outcome.infrastructure else heard.score
        return ToolResult(heard.parts, heard.outcome, reward, heard.done, metrics=heard.metadata, reason=heard.reason)

    async def finish(self) -> Mapping[str, float]:
        """Nothing: every score belongs to the turn that earned it."""
        return {}

    async def close(self) -> None:
        self._closed = True
        for conversation in self._conversations.values():
            await conversation.close()


def _offered(name: str) -> str:
    return f"feedback_{name}"


def _spec(name: str, owner: str) -> ToolSpec:
    description = f"Feedback of {name} on the policy's last turn, with its score."
    return ToolSpec(_offered(name), description, PARAMETERS, audience="loop", owner=owner or f"interaction {name!r}")


def _messages(arguments: str) -> list[dict[str, Any]]:
    value = parse_object(arguments)
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ValueError("Give `messages`: an array of chat messages, each an object with a `role`.")
    return messages

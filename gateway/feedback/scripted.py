"""`ScriptedInteraction`: a simulated user that gives scripted replies, the same for every run."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from gateway.config.base import FrozenModel
from gateway.feedback.base import BaseInteraction, Message, Turn, last_message_text


class ScriptedReply(FrozenModel):
    """A reply that is given once, and its conditions."""

    say: str | list[dict[str, Any]]
    """The reply: text, or content parts as in chat messages."""
    contains: str | None = None
    """Condition: the policy's last turn contains this text."""
    equals: str | None = None
    """Condition: the policy's last turn is this text, apart from white space around it."""
    score: float = 0.0
    """The score of the policy's turn that is replied to."""
    done: bool = False
    """Ends the rollout."""

    def matches(self, text: str) -> bool:
        """Whether the conditions hold for the policy's last turn."""
        is_contained = self.contains is None or self.contains in text
        return is_contained and (self.equals is None or self.equals.strip() == text.strip())


class ScriptSettings(FrozenModel):
    """The configuration of `ScriptedInteraction`."""

    name: str = "scripted"
    replies: tuple[ScriptedReply, ...] = ()
    """Each turn uses up the first reply that matches; when none is left, the rollout ends."""
    otherwise: ScriptedReply = ScriptedReply(say="Please go on.")
    """The reply where none of those left matches; never used up."""
    farewell: str = "Thank you, that is all."
    """The reply when all are used up."""


_REPLIES = TypeAdapter(tuple[ScriptedReply, ...])


class ScriptedInteraction(BaseInteraction):
    """Gives scripted replies. `replies` in a dataset row replaces the configured ones."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.script = ScriptSettings.model_validate(config)
        self._remaining: dict[str, list[ScriptedReply]] = {}

    async def start_interaction(self, instance_id: str | None = None, replies: Any = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        replies = self.script.replies if replies is None else _REPLIES.validate_python(replies)
        self._remaining[instance_id] = list(replies)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        remaining = self._remaining[instance_id]
        if not remaining:
            return True, self.script.farewell, 0.0, {"left": 0}
        text = last_message_text(messages) or ""
        reply = next((reply for reply in remaining if reply.matches(text)), None)
        if reply is None:
            reply = self.script.otherwise
        else:
            remaining.remove(reply)
        return reply.done, reply.say, reply.score, {"left": len(remaining)}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._remaining.pop(instance_id, None)

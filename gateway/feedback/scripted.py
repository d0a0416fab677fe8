"""A user who follows a script says the same things in the same order every time."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from gateway.config.models import Frozen
from gateway.feedback.base import BaseInteraction, Message, Turn, said


class Reply(Frozen):
    """What the user says, once, and when."""

    say: str | list[dict[str, Any]]
    """A text, or content parts as chat messages write them."""
    contains: str | None = None
    """Only when the policy's last turn contains this text."""
    equals: str | None = None
    """Only when the policy's last turn is this text, white space around it aside."""
    score: float = 0.0
    """The score of the policy's turn that it answers."""
    done: bool = False
    """Ends the rollout."""

    def answers(self, text: str) -> bool:
        contained = self.contains is None or self.contains in text
        return contained and (self.equals is None or self.equals.strip() == text.strip())


class Script(Frozen):
    name: str = "scripted"
    replies: tuple[Reply, ...] = ()
    """Each turn uses up the first of these that fits; when none is left, the rollout ends."""
    otherwise: Reply = Reply(say="Please go on.")
    """Said where replies are left, but none fits; never used up."""
    farewell: str = "Thank you, that is all."
    """Said when every reply is used up."""


_REPLIES = TypeAdapter(tuple[Reply, ...])


class ScriptedInteraction(BaseInteraction):
    """A dataset row may bring `replies` of its own, in place of the configured ones."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.script = Script.model_validate(config)
        self._left: dict[str, list[Reply]] = {}

    async def start_interaction(self, instance_id: str | None = None, replies: Any = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self._left[instance_id] = list(self.script.replies if replies is None else _REPLIES.validate_python(replies))
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        left = self._left[instance_id]
        if not left:
            return True, self.script.farewell, 0.0, {"left": 0}
        text = said(messages) or ""
        reply = next((one for one in left if one.answers(text)), None)
        if reply is None:
            reply = self.script.otherwise
        else:
            left.remove(reply)
        return reply.done, reply.say, reply.score, {"left": len(left)}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._left.pop(instance_id, None)

"""An interaction: it answers when the policy ends its turn without a call. This one gives a second try."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from gateway.feedback.base import BaseInteraction, Message, Turn, last_message_text

RIGHT_REPLY = "Your response is correct!"
WRONG_REPLY = "Your response is incorrect! You need to reflect on your answer and try again."


class JudgeInteraction(BaseInteraction):
    """Compares what follows `####` with the task's answer. The second wrong answer ends the rollout."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.tries: dict[str, int] = {}
        self.answers: dict[str, str] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        """Begins a rollout; the arguments are the task's `interaction_kwargs`."""
        instance_id = instance_id or str(uuid4())
        self.tries[instance_id], self.answers[instance_id] = 0, str(ground_truth)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        """Whether the rollout is over, the reply, the score of the policy's turn, and what else to record."""
        self.tries[instance_id] += 1
        given = (last_message_text(messages) or "").rpartition("####")[2].strip()
        if given == self.answers[instance_id]:
            return True, RIGHT_REPLY, 1.0, {}
        return self.tries[instance_id] > 1, WRONG_REPLY, 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Ends a rollout, whatever happened in it."""
        self.tries.pop(instance_id, None)
        self.answers.pop(instance_id, None)

"""A maths problem has one answer, a number; the policy is told only whether it has it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from gateway.feedback.base import BaseInteraction, Message, Turn, said
from gateway.feedback.score import compute_score, extract_solution

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """`method: strict` (the default) wants `#### n`; `flexible` takes the last number of the text.

    The answer is the last assistant message. With `role: user`, or where no assistant has spoken at all, it is the last
    user message, and it is read as the older form of this interaction reads it: after an added `#### `, flexibly.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.method = config.get("method", "strict")
        self.role = config.get("role", "assistant")
        if self.method not in ("strict", "flexible"):
            raise ValueError(f"method is {self.method!r}; it is 'strict' or 'flexible'")
        if self.role not in ("assistant", "user"):
            raise ValueError(f"role is {self.role!r}; it is 'assistant' or 'user'")
        self._instances: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        if ground_truth is None:
            raise ValueError("gsm8k needs `ground_truth` in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        truth = extract_solution(str(ground_truth)) or ground_truth  # The data set has a solution, then `#### n`.
        self._instances[instance_id] = {"response": "", "ground_truth": truth, "method": self.method}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        instance = self._instances[instance_id]
        answer = said(messages, self.role)
        older = self.role == "user" or answer is None
        if older:
            answer = said(messages, "user") or ""
            answer = answer if answer.startswith("#### ") else f"#### {answer}"
        instance["response"], instance["method"] = answer, "flexible" if older else self.method
        if await self.calculate_score(instance_id) == 1.0:
            return True, RIGHT, 1.0, {}
        return False, WRONG, 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        instance = self._instances[instance_id]
        return compute_score(instance["response"], instance["ground_truth"], method=instance["method"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)

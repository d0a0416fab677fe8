"""An answer may be tried again, a given number of times, and a later success may be worth less."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, PositiveInt

from gateway.config.find import find
from gateway.config.models import Frozen
from gateway.feedback.answer import ask
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.entry import Declared, build
from gateway.media import to_parts
from gateway.native.thread import Threads
from gateway.types import Text


class Inner(Frozen):
    class_name: str
    """The interaction that judges each attempt, as a dotted path."""
    config: dict[str, Any] = {}
    """Its configuration."""


class Attempts(Frozen):
    name: str = "attempts"
    interaction: Inner
    """The interaction that is tried several times."""
    max_attempts: PositiveInt = 3
    """The attempt with this number ends the rollout, right or wrong."""
    weights: Annotated[tuple[float, ...], Field(min_length=1)] = (1.0,)
    """What an attempt's score is multiplied by; the last weight holds for all later attempts."""
    used_up: str = "You have no attempts left."
    """Said after the last attempt, unless it ended the rollout by itself."""
    remaining: str = "Attempts left: {left}."
    """Said after every other attempt that did not end the rollout; empty says nothing."""


class AttemptsInteraction(BaseInteraction):
    """The metadata of a turn holds `attempt`, `attempts_left`, and `scores`, unweighted, one for each attempt.

    A turn that its interaction could not judge is no attempt.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.rules = Attempts.model_validate(config)
        inner = self.rules.interaction
        entry = Declared(find(inner.class_name, field="interaction.class_name"), inner.config, self.name)
        self.inner = build([entry])[self.name]
        self._scores: dict[str, list[float]] = {}
        self._threads = Threads()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        started = await self._threads.run(self.inner.start_interaction, instance_id, **kwargs)
        instance_id = started if isinstance(started, str) else instance_id
        self._scores[instance_id] = []
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        scores, most = self._scores[instance_id], self.rules.max_attempts
        if len(scores) >= most:
            return True, self.rules.used_up, 0.0, self._report(scores)
        done, answer, score, metadata = await ask(self.inner, self._threads, instance_id, messages, kwargs)
        weight = self.rules.weights[min(len(scores), len(self.rules.weights) - 1)]
        scores.append(score)
        left = most - len(scores)
        if not done:
            note = self.rules.remaining.replace("{left}", str(left)) if left else self.rules.used_up
            answer = [*to_parts(answer), Text(note)] if note else answer
        return done or not left, answer, weight * score, {**metadata, **self._report(scores)}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The best attempt so far, unweighted."""
        return max(self._scores[instance_id], default=0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._scores.pop(instance_id, None)
        await self._threads.run(self.inner.finalize_interaction, instance_id)

    async def aclose(self) -> None:
        aclose = getattr(self.inner, "aclose", None)
        if aclose is not None:
            await self._threads.run(aclose)

    def _report(self, scores: list[float]) -> dict[str, Any]:
        left = self.rules.max_attempts - len(scores)
        return {"attempt": len(scores), "attempts_left": left, "scores": list(scores)}

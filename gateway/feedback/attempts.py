"""`AttemptsInteraction`: lets the policy try again with another interaction; later tries score less."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, PositiveInt

from gateway.config.base import FrozenModel
from gateway.config.load_object import load_object
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.conversation import run_turn
from gateway.feedback.interaction_toolset import build_interaction
from gateway.media import to_parts
from gateway.native.thread_pool import ThreadPool
from gateway.types import Text


class JudgeEntry(FrozenModel):
    """The interaction that judges each attempt."""

    class_name: str
    """Its class, as a dotted path."""
    config: dict[str, Any] = {}
    """Its configuration."""


class AttemptsSettings(FrozenModel):
    """The configuration of `AttemptsInteraction`."""

    name: str = "attempts"
    interaction: JudgeEntry
    """The interaction that judges each attempt."""
    max_attempts: PositiveInt = 3
    """The rollout ends with this attempt, right or wrong."""
    weights: Annotated[tuple[float, ...], Field(min_length=1)] = (1.0,)
    """Factors of the scores of the first, second, ... attempt; the last one holds for all later attempts."""
    used_up: str = "You have no attempts left."
    """Added to the reply to the last attempt, unless that attempt ended the rollout."""
    remaining: str = "Attempts left: {left}."
    """Added to the reply to every other attempt that did not end the rollout; may be empty."""


class AttemptsInteraction(BaseInteraction):
    """Counts attempts. A turn's metadata has `attempt`, `attempts_left`, and `scores` of all attempts, unweighted.

    A turn that the judging interaction failed to judge does not count as an attempt.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.settings = AttemptsSettings.model_validate(config)
        judge = self.settings.interaction
        judge_class = load_object(judge.class_name, field="interaction.class_name")
        self.judge = build_interaction(judge_class, judge.config, self.name)
        self._scores: dict[str, list[float]] = {}
        self._threads = ThreadPool()

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        started_id = await self._threads.run(self.judge.start_interaction, instance_id, **kwargs)
        instance_id = started_id if isinstance(started_id, str) else instance_id
        self._scores[instance_id] = []
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        scores, max_attempts = self._scores[instance_id], self.settings.max_attempts
        if len(scores) >= max_attempts:
            return True, self.settings.used_up, 0.0, self._attempt_metadata(scores)
        done, reply, score, metadata = await run_turn(self.judge, self._threads, instance_id, messages, kwargs)
        weight = self.settings.weights[min(len(scores), len(self.settings.weights) - 1)]
        scores.append(score)
        left = max_attempts - len(scores)
        if not done:
            note = self.settings.remaining.replace("{left}", str(left)) if left else self.settings.used_up
            reply = [*to_parts(reply), Text(note)] if note else reply
        return done or not left, reply, weight * score, {**metadata, **self._attempt_metadata(scores)}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The best score so far, unweighted."""
        return max(self._scores[instance_id], default=0.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._scores.pop(instance_id, None)
        await self._threads.run(self.judge.finalize_interaction, instance_id)

    async def aclose(self) -> None:
        aclose = getattr(self.judge, "aclose", None)
        if aclose is not None:
            await self._threads.run(aclose)

    def _attempt_metadata(self, scores: list[float]) -> dict[str, Any]:
        left = self.settings.max_attempts - len(scores)
        return {"attempt": len(scores), "attempts_left": left, "scores": list(scores)}

"""A language model plays the user; when it cannot be reached there is no feedback, rather than a score of zero."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from gateway.config.models import Frozen
from gateway.errors import Unavailable
from gateway.feedback.base import BaseInteraction, Message, Turn, plain_text, said
from gateway.feedback.endpoint import ChatEndpoint
from gateway.feedback.score import Method, compute_score

PERSONA = "You are a person who asked an assistant for help. Answer it as that person, briefly."
SECRET = "You know the right answer, and you never tell it or hint at its value:\n{ground_truth}"  # noqa: S105
ENDING = "When you are content with the help, or have given up, end your message with {stop}."
JUDGE = (
    'Judge the assistant\'s last message. Answer with a JSON object only: {"score": <from 0 to 1>, "done": <true if '
    "the conversation should end>}."
)


class Simulated(Frozen):
    name: str = "simulated"
    base_url: str
    """Of an OpenAI-compatible API, as `https://host/v1`."""
    model: str
    """The model that plays the user."""
    api_key: SecretStr = SecretStr("")
    """Sent as a bearer token; write it as `${ENV_VAR}`."""
    persona: str = PERSONA
    """Who the user is; a dataset row may bring its own."""
    stop: str = "[DONE]"
    """With this in its message the user ends the rollout; it is cut out."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    max_tokens: PositiveInt = 512
    """Of one message of the user."""
    timeout_s: PositiveFloat = 45.0
    """Deadline of one request, its retries included."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts where the connection is refused, or the endpoint is busy or broken (429, 5xx)."""
    rule: Method | None = None
    """Scores a turn by the number in it, as `gsm8k` does."""
    judge: bool | str = False
    """Asks the model for a score; a text is the instruction to the judge. Used where no `rule` is given."""


@dataclass(frozen=True, slots=True)
class _Person:
    persona: str
    ground_truth: Any


class SimulatedInteraction(BaseInteraction):
    """A dataset row may bring `persona` and `ground_truth`; the latter is told to the simulating model only."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.settings = Simulated.model_validate(config)
        key = self.settings.api_key.get_secret_value()
        self._endpoint = ChatEndpoint(self.settings.base_url, key, self.settings.timeout_s, self.settings.retries)
        self._people: dict[str, _Person] = {}

    async def start_interaction(
        self, instance_id: str | None = None, persona: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        if self.settings.rule is not None and ground_truth is None:
            raise ValueError("a `rule` needs `ground_truth` in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        self._people[instance_id] = _Person(persona or self.settings.persona, ground_truth)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        person, settings = self._people[instance_id], self.settings
        score, done = await self._score(person, messages)
        told = _secret(person) + ENDING.format(stop=settings.stop)
        chat = [{"role": "system", "content": f"{person.persona}\n\n{told}"}, *flipped(messages)]
        answer = await self._endpoint.ask(self._body(chat, settings.temperature))
        stopped = settings.stop in answer
        return done or stopped, answer.replace(settings.stop, "").strip(), score, {"stopped": stopped}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._people.pop(instance_id, None)

    async def aclose(self) -> None:
        await self._endpoint.aclose()

    async def _score(self, person: _Person, messages: list[Message]) -> tuple[float, bool]:
        """The score of the policy's last turn, and whether it ends the rollout."""
        settings = self.settings
        if settings.rule is not None:
            score = compute_score(said(messages) or "", person.ground_truth, settings.rule)
            return score, score == 1.0
        if not settings.judge:
            return 0.0, False
        told = _secret(person) + (settings.judge if isinstance(settings.judge, str) else JUDGE)
        # The chat is given as one text: as messages, the judge would be tempted to answer it.
        chat = [{"role": "system", "content": told}, {"role": "user", "content": transcript(messages)}]
        return verdict(await self._endpoint.ask(self._body(chat, 0.0)), self._endpoint.shown)

    def _body(self, chat: list[Message], temperature: float) -> dict[str, Any]:
        settings = self.settings
        return {
            "model": settings.model,
            "messages": chat,
            "temperature": temperature,
            "max_tokens": settings.max_tokens,
        }


def flipped(messages: list[Message]) -> list[Message]:
    """The chat as its user sees it: they are the assistant's user, and the model that plays them is an assistant."""
    roles = {"user": "assistant", "assistant": "user"}
    seen = ((roles.get(message.get("role", "")), plain_text(message.get("content"))) for message in messages)
    return [{"role": role, "content": text} for role, text in seen if role and text]


def transcript(messages: list[Message]) -> str:
    turns = ((message.get("role"), plain_text(message.get("content"))) for message in messages)
    return "\n\n".join(f"{role}: {text}" for role, text in turns if role in ("user", "assistant"))


def verdict(text: str, where: str) -> tuple[float, bool]:
    """The first JSON object of a judge's answer, whatever it wrote around it."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
        score, done = found["score"], found.get("done", False)
    except (ValueError, LookupError, RecursionError):
        raise Unavailable(f"the judge at {where} gave no JSON object with a `score`") from None
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise Unavailable(f"the judge at {where} gave a score that is no number from 0 to 1")
    return float(score), done is True


def _secret(person: _Person) -> str:
    return "" if person.ground_truth is None else SECRET.format(ground_truth=person.ground_truth) + "\n\n"

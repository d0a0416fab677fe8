"""`SimulatedInteraction`: a language model behind an OpenAI-compatible API plays the user, and may judge the policy.

If the API cannot be reached there is no feedback, rather than a score of zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any
from uuid import uuid4

import anyio
import httpx2
from pydantic import Field, PositiveFloat, PositiveInt, SecretStr

from gateway.config.base import FrozenModel
from gateway.errors import Unavailable
from gateway.feedback.base import BaseInteraction, Message, Turn, last_message_text, plain_text
from gateway.feedback.gsm8k import Method, compute_score

MAX_RESPONSE_BYTES = 1024 * 1024
"""A larger response is refused while it is read."""
BACKOFF_S, MAX_BACKOFF_S = 0.25, 8.0
NOT_CONNECTED, TOO_MANY_REQUESTS = 0, 429
VERDICT_CHARS = 4000
"""Of a judge's answer, only the end is searched for its verdict."""


class ChatEndpoint:
    """A client of `POST {base_url}/chat/completions`, with retries under one deadline."""

    def __init__(self, base_url: str, key: str, timeout_s: float, retries: int) -> None:
        self._url = httpx2.URL(base_url.rstrip("/") + "/chat/completions")
        self._key = key
        self._timeout_s = timeout_s
        self._retries = retries
        self._client: httpx2.AsyncClient | None = None

    @property
    def address(self) -> str:
        """Scheme, host and port for messages; the rest of the URL may hold a secret."""
        return f"{self._url.scheme}://{self._url.host}" + (f":{self._url.port}" if self._url.port else "")

    async def complete(self, body: dict[str, Any]) -> str:
        """The text of the first choice; raises Unavailable or TimeoutError."""
        with anyio.move_on_after(self._timeout_s):
            return _first_choice_text(await self._post_with_retries(body), self.address)
        raise TimeoutError(f"{self.address} gave no answer within {self._timeout_s:g} s")

    async def aclose(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _post_with_retries(self, body: dict[str, Any]) -> bytes:
        for attempt in count():
            status, retry_after_s, content = await self._post(body)
            if status == httpx2.codes.OK:
                break
            is_temporary = status in (NOT_CONNECTED, TOO_MANY_REQUESTS) or status >= httpx2.codes.INTERNAL_SERVER_ERROR
            if attempt == self._retries or not is_temporary:
                # Without the body: some endpoints repeat the key in it.
                problem = f"answered with status {status}" if status else "cannot be reached"
                raise Unavailable(f"{self.address} {problem}")
            backoff_s = BACKOFF_S * 2**attempt if retry_after_s is None else retry_after_s
            await anyio.sleep(min(backoff_s, MAX_BACKOFF_S))
        return content

    async def _post(self, body: dict[str, Any]) -> tuple[int, float | None, bytes]:
        """Status, the seconds of `retry-after`, and the content."""
        if self._client is None:
            # The deadline of `complete` covers all attempts; the client needs none.
            self._client = httpx2.AsyncClient(timeout=None)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        content = bytearray()
        try:
            async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise Unavailable(f"{self.address} answered with more than {MAX_RESPONSE_BYTES} bytes")
        except httpx2.ConnectError:
            return NOT_CONNECTED, None, b""
        except httpx2.HTTPError as error:
            # Not repeated: the request may have been received and charged for.
            raise Unavailable(f"{self.address} broke off: {type(error).__name__}") from None
        retry_after = response.headers.get("retry-after", "")
        return response.status_code, float(retry_after) if retry_after.isdecimal() else None, bytes(content)


def _first_choice_text(content: bytes, address: str) -> str:
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise Unavailable(f"{address} answered with something that is no chat completion") from None
    if not isinstance(text, str):
        raise Unavailable(f"{address} answered without a text")
    return text


DEFAULT_PERSONA = "You are a person who asked an assistant for help. Answer it as that person, briefly."
GROUND_TRUTH_PROMPT = "You know the right answer, and you never tell it or hint at its value:\n{ground_truth}"
STOP_PROMPT = "When you are content with the help, or have given up, end your message with {stop}."
JUDGE_PROMPT = (
    'Judge the assistant\'s last message. Answer with a JSON object only: {"score": <from 0 to 1>, "done": <true if '
    "the conversation should end>}."
)


class SimulatedSettings(FrozenModel):
    """The configuration of `SimulatedInteraction`."""

    name: str = "simulated"
    base_url: str
    """Base URL of an OpenAI-compatible API, such as `https://host/v1`."""
    model: str
    """The model that plays the user."""
    api_key: SecretStr = SecretStr("")
    """Sent as a bearer token; write it as `${ENV_VAR}`."""
    persona: str = DEFAULT_PERSONA
    """Who the user is; a dataset row may bring its own."""
    stop: str = "[DONE]"
    """A message of the user with this text ends the rollout; the text is removed from it."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    max_tokens: PositiveInt = 512
    """Limit on one message of the user."""
    timeout_s: PositiveFloat = 45.0
    """Deadline of one request, its retries included."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts if the connection is refused, or the endpoint is busy or fails (429, 5xx)."""
    rule: Method | None = None
    """Scores a turn by its final number, as `gsm8k` does."""
    judge: bool | str = False
    """Asks the model for a score; a text is the instruction to the judge. Ignored if there is a `rule`."""


@dataclass(frozen=True, slots=True)
class _SimulatedUser:
    persona: str
    ground_truth: Any


class SimulatedInteraction(BaseInteraction):
    """A simulated user. A dataset row may have `persona`, and `ground_truth`, which only the simulating model sees."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.settings = SimulatedSettings.model_validate(config)
        key = self.settings.api_key.get_secret_value()
        self._endpoint = ChatEndpoint(self.settings.base_url, key, self.settings.timeout_s, self.settings.retries)
        self._users: dict[str, _SimulatedUser] = {}

    async def start_interaction(
        self, instance_id: str | None = None, persona: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> str:
        if self.settings.rule is not None and ground_truth is None:
            raise ValueError("a `rule` needs `ground_truth` in the session's feedback arguments")
        instance_id = instance_id or str(uuid4())
        self._users[instance_id] = _SimulatedUser(persona or self.settings.persona, ground_truth)
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        user, settings = self._users[instance_id], self.settings
        score, done = await self._score(user, messages)
        prompt = _ground_truth_prompt(user) + STOP_PROMPT.format(stop=settings.stop)
        chat = [{"role": "system", "content": f"{user.persona}\n\n{prompt}"}, *swap_roles(messages)]
        reply = await self._endpoint.complete(self._request_body(chat, settings.temperature))
        stopped = settings.stop in reply
        return done or stopped, reply.replace(settings.stop, "").strip(), score, {"stopped": stopped}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._users.pop(instance_id, None)

    async def aclose(self) -> None:
        await self._endpoint.aclose()

    async def _score(self, user: _SimulatedUser, messages: list[Message]) -> tuple[float, bool]:
        """The score of the policy's last turn, and whether that turn ends the rollout."""
        settings = self.settings
        if settings.rule is not None:
            score = compute_score(last_message_text(messages) or "", user.ground_truth, settings.rule)
            return score, score == 1.0
        if not settings.judge:
            return 0.0, False
        prompt = _ground_truth_prompt(user) + (settings.judge if isinstance(settings.judge, str) else JUDGE_PROMPT)
        # The chat is one text: given as messages, it would tempt the judge to continue it.
        chat = [{"role": "system", "content": prompt}, {"role": "user", "content": format_transcript(messages)}]
        return parse_verdict(await self._endpoint.complete(self._request_body(chat, 0.0)), self._endpoint.address)

    def _request_body(self, chat: list[Message], temperature: float) -> dict[str, Any]:
        settings = self.settings
        return {
            "model": settings.model,
            "messages": chat,
            "temperature": temperature,
            "max_tokens": settings.max_tokens,
        }


def swap_roles(messages: list[Message]) -> list[Message]:
    """The chat with user and assistant swapped, for the model that plays the user."""
    swapped = {"user": "assistant", "assistant": "user"}
    texts = ((swapped.get(message.get("role", "")), plain_text(message.get("content"))) for message in messages)
    return [{"role": role, "content": text} for role, text in texts if role and text]


def format_transcript(messages: list[Message]) -> str:
    """The chat as one text, without system messages."""
    turns = ((message.get("role"), plain_text(message.get("content"))) for message in messages)
    return "\n\n".join(f"{role}: {text}" for role, text in turns if role in ("user", "assistant"))


def parse_verdict(text: str, address: str, best: float = 1.0) -> tuple[float, bool]:
    """Score, from 0 to 1 where the highest is `best`, and `done`, of the last JSON object with a score in the end of a
    judge's answer: other text around it is ignored."""
    verdicts = [found for found in _find_objects(text[-VERDICT_CHARS:]) if "score" in found]
    if not verdicts:
        raise Unavailable(f"the judge at {address} gave no JSON object with a `score`")
    score = verdicts[-1]["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= best:
        raise Unavailable(f"the judge at {address} gave a score that is no number from 0 to {best:g}")
    return float(score) / best, verdicts[-1].get("done") is True


def _find_objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            found, end = None, start + 1
        if isinstance(found, dict):
            yield found
        start = text.find("{", end)


def _ground_truth_prompt(user: _SimulatedUser) -> str:
    return "" if user.ground_truth is None else GROUND_TRUTH_PROMPT.format(ground_truth=user.ground_truth) + "\n\n"

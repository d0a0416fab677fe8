"""Rewords questions by a model behind an OpenAI-compatible endpoint; a text that loses a value, adds a number or tells
the answer is not taken."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import ConfigError, Unavailable
from gateway.feedback.simulated import ChatEndpoint
from mtrl_plugins.task_maker.chain import Chain
from mtrl_plugins.task_maker.questions import ANSWER, MAX_QUESTION, added_numbers, missing_values, tells_answer

TIMEOUT_S, RETRIES = 60.0, 2
MOST_FAILED = 16
"""Requests in a row without an answer after which the model is not asked any more."""
PROMPT = (
    "Reword this request as a person would ask it. Keep every value exactly as it is, the order of what is to be done,"
    " and every condition. Do not answer it, and write nothing else."
)
ANSWER_FORM = ANSWER.partition("? ")[2]


@dataclass
class Rewording:
    """The endpoint, with how often its texts were taken."""

    url: str
    model: str
    key: str = ""
    taken: int = 0
    refused: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self._failed_in_row = 0
        self._endpoint = ChatEndpoint(self.url, self.key, TIMEOUT_S, RETRIES)

    async def check(self) -> None:
        """Asks the model for one text; raises ConfigError if there is no answer."""
        if not self.model:
            raise ConfigError("is missing", field="--reword-model", remedy="name the model that rewords questions")
        try:
            await self._complete("Find the box of an item: item 412.")
        except (Unavailable, TimeoutError) as error:
            remedy = "correct the URL, --reword-model, or the key in MTRL_REWORD_KEY"
            raise ConfigError(f"no question can be reworded: {error}", field="--reword-url", remedy=remedy) from error

    async def reword(self, question: str, chain: Chain) -> str:
        """The question in other words, or as it is."""
        if self._failed_in_row >= MOST_FAILED:
            self.failed += 1
            return question
        try:
            text = await self._complete(question)
        except (Unavailable, TimeoutError):
            self.failed += 1
            self._failed_in_row += 1
            return question
        self._failed_in_row = 0
        if chain.answer is not None and "####" not in text:
            text = f"{text} {ANSWER_FORM}"
        tells = chain.answer is not None and tells_answer(text, chain.answer)
        changes_values = missing_values(text, chain) or added_numbers(text, question)
        if not text or len(text) > MAX_QUESTION or tells or changes_values:
            self.refused += 1
            return question
        self.taken += 1
        return text

    async def _complete(self, question: str) -> str:
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
        return (await self._endpoint.complete({"model": self.model, "messages": messages})).strip()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._endpoint.aclose()

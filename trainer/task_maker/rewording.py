"""Rewords questions by a model behind an OpenAI-compatible endpoint; one that loses a value or tells the answer is not
taken."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import Unavailable
from gateway.feedback.simulated import ChatEndpoint
from trainer.task_maker.chain import Chain
from trainer.task_maker.questions import ANSWER, MAX_QUESTION, missing_values, tells_answer

TIMEOUT_S, RETRIES = 60.0, 2
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
        self._endpoint = ChatEndpoint(self.url, self.key, TIMEOUT_S, RETRIES)

    async def reword(self, question: str, chain: Chain) -> str:
        """The question in other words, or as it is."""
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
        try:
            text = (await self._endpoint.complete({"model": self.model, "messages": messages})).strip()
        except (Unavailable, TimeoutError):
            self.failed += 1
            return question
        if chain.answer is not None and "####" not in text:
            text = f"{text} {ANSWER_FORM}"
        tells = chain.answer is not None and tells_answer(text, chain.answer)
        if not text or len(text) > MAX_QUESTION or tells or missing_values(text, chain):
            self.refused += 1
            return question
        self.taken += 1
        return text

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._endpoint.aclose()

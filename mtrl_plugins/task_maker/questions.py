"""Turns a chain of calls into a question, by templates over the tools' descriptions, their arguments and results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.errors import ConfigError, Unavailable
from gateway.feedback.simulated import ChatEndpoint
from gateway.types import ToolSpec
from mtrl_plugins.task_maker.chain import Chain, Step
from mtrl_plugins.task_maker.values import Path, Value, leaves

MAX_PHRASE = 160
MAX_QUESTION = 2_000
OPENINGS = ("", "Use the tools. ", "With the tools at hand: ")
ANSWER = "What is {what}? Answer with #### and the value."
FUNCTION_WORDS = {"as", "at", "by", "for", "from", "in", "is", "of", "on", "to", "with"}
_NUMBER = re.compile(r"\d+")
_SENTENCE = re.compile(r"(.+?[.!?])(?=\s|$)", re.DOTALL)


def write_question(chain: Chain, specs: Mapping[str, ToolSpec], draw: Random) -> str:
    """The question of a chain; deterministic for the same draw."""
    phrases = _phrases(chain.steps, specs)
    steps = [f"{phrase}{_arguments_text(step)}." for phrase, step in zip(phrases, chain.steps, strict=True)]
    if len(steps) > 1:
        steps = [f"{number}. {text}" for number, text in enumerate(steps, 1)]
    if chain.answer is not None:
        steps.append(ANSWER.format(what=_answer_text(chain.answer, chain.steps[-1], len(chain.steps))))
    separator = "\n" if len(chain.steps) > 1 else " "
    return (draw.choice(OPENINGS) + separator.join(steps)).strip()


def _phrases(steps: Sequence[Step], specs: Mapping[str, ToolSpec]) -> list[str]:
    """What each step does: its tool's description, with the name where another tool has the same."""
    phrase = {name: _phrase(spec) for name, spec in specs.items()}
    counts = [*phrase.values()]
    return [
        phrase[step.tool] if counts.count(phrase[step.tool]) == 1 else f"{phrase[step.tool]} ({step.tool})"
        for step in steps
    ]


def _phrase(spec: ToolSpec) -> str:
    """The first sentence of a description, or the name as words."""
    text = " ".join(spec.description.split())
    match = _SENTENCE.match(text)
    sentence = (match[1] if match else text).rstrip(".!? ")
    return sentence if 0 < len(sentence) <= MAX_PHRASE and "####" not in sentence else spec.name.replace("_", " ")


def _arguments_text(step: Step) -> str:
    parts = [f"{name} {_value_text(value, (name,), step.links)}" for name, value in step.arguments.items()]
    return f": {', '.join(parts)}" if parts else ""


def _value_text(value: Any, path: Path, links: Mapping[Path, Value]) -> str:
    """A value as JSON; one of an earlier result by where it is."""
    if path in links:
        return _link_text(links[path])
    if isinstance(value, Mapping):
        items = (f"{json.dumps(key)}: {_value_text(item, (*path, key), links)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value_text(item, (*path, at), links) for at, item in enumerate(value)) + "]"
    is_word = isinstance(value, str) and len(path) == 1 and re.fullmatch(r"[\w./-]+", value)
    return str(value) if is_word else json.dumps(value, ensure_ascii=False)


def _link_text(value: Value) -> str:
    place, step = _place_text(value.path), f"the result of step {(value.step or 0) + 1}"
    if not place:
        return f"({step})"
    return f"({place} in {step})" if place.startswith("item") else f"(the {place} in {step})"


def _place_text(path: Path) -> str:
    """A place in a result, counted from 1, such as `name of item 8 of entities`."""
    return " of ".join(f"item {step + 1}" if isinstance(step, int) else _key_text(step) for step in reversed(path))


def _key_text(key: str) -> str:
    """A key as it is; in quotes where the question would read as if it was no key."""
    return json.dumps(key) if key.lower() in FUNCTION_WORDS else key


def _answer_text(answer: Value, last: Step, steps: int) -> str:
    """Where the answer is: its key alone if the result has it once, and its line in a text."""
    of_step = f" in the result of step {steps}" if steps > 1 else ""
    if not answer.path:
        return f"the result{f' of step {steps}' if steps > 1 else ''}"
    end, keys = answer.path[-1], [path[-1] for _, path, _ in leaves(last.result) if path]
    if isinstance(end, int) and len(answer.path) == 1:
        is_text = last.result == last.text.rstrip().splitlines()
        return f"{'line' if is_text else 'item'} {end + 1}{of_step}"
    place = _key_text(end) if isinstance(end, str) and keys.count(end) == 1 else _place_text(answer.path)
    return f"{place}{of_step}" if isinstance(end, int) else f"the {place}{of_step}"


def tells_answer(question: str, answer: Value) -> bool:
    """Whether the answer stands in the question as a word."""
    return _has_word(question.casefold(), answer.text.casefold())


def _has_word(text: str, word: str) -> bool:
    """Whether a text has a word, and not only as a part of a longer one."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def added_numbers(question: str, original: str) -> set[str]:
    """Numbers that a reworded question tells and the original does not."""
    return set(_NUMBER.findall(question)) - set(_NUMBER.findall(original))


def missing_values(question: str, chain: Chain) -> list[str]:
    """The values that a question must tell and does not; empty for one of the templates."""
    linked = {(at, path) for at, step in enumerate(chain.steps) for path in step.links}
    named = {
        json.dumps(value, ensure_ascii=False).strip('"')
        for at, step in enumerate(chain.steps)
        for path, value in _scalars(step.arguments)
        if (at, path) not in linked
    }
    return sorted(text for text in named if not _has_word(question, text))


def _scalars(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The texts and numbers of arguments, with their places; a person says what a boolean means in other words."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _scalars(item, (*path, key))
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path, value


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

"""Turns a chain of calls into a question, by templates over the tools' descriptions, their arguments and results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gateway.types import ToolSpec
from mtrl_plugins.task_maker.chain import Chain, Step
from mtrl_plugins.task_maker.values import Path, Value, leaves

MAX_PHRASE = 160
MAX_QUESTION = 2_000
OPENINGS = ("", "Use the tools. ", "With the tools at hand: ")
ANSWER_FORM = " Answer with #### and the value."
ANSWER = "What is {what}?" + ANSWER_FORM
FUNCTION_WORDS = {"as", "at", "by", "for", "from", "in", "is", "of", "on", "to", "with"}
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
    return re.search(rf"(?<!\w){re.escape(answer.text.casefold())}(?!\w)", question.casefold()) is not None

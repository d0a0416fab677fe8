"""Word problems whose numbers need `calculate`, whose facts need `look_up`, both, or no tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, islice
from random import Random
from typing import Any

from mtrl_plugins.demo.facts.facts_tasks import CITIES, PEOPLE
from mtrl_plugins.demo.problem import HELD_OUT_SHARE, ExpectedCall, Split

EXAMPLES = 4
"""Worked examples before a question, of its kind."""
SYSTEM = "Use a function where you need one. Then answer with #### and the number."


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A question, the facts that `look_up` knows, and the calls that lead to the answer."""

    question: str
    answer: str
    calls: tuple[ExpectedCall, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def split(self) -> Split:
        """A digest of the whole problem says whether it is held out, so that no problem is in both splits."""
        content = json.dumps([self.question, self.facts], sort_keys=True)
        return "train" if sha256(content.encode()).digest()[0] % HELD_OUT_SHARE else "held_out"

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The problem as a worked example."""
        chat: list[dict[str, Any]] = [{"role": "user", "content": self.question}]
        for number, call in enumerate(self.calls):
            function = {"name": call.tool, "arguments": json.dumps(dict(call.arguments))}
            id = f"call{number:05}"
            called = {"id": id, "type": "function", "function": function}
            chat += [
                {"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": id, "content": call.result},
            ]
        return [*chat, {"role": "assistant", "content": f"#### {self.answer}"}]


def _calculate(left: int, sign: str, right: int) -> ExpectedCall:
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return ExpectedCall("calculate", {"expression": f"{left} {sign} {right}"}, str(result))


def _look_up(name: str, facts: Mapping[str, str]) -> ExpectedCall:
    return ExpectedCall("look_up", {"name": name}, facts[name])


THINGS = ("apples", "coins", "stamps", "shells", "books", "nails")


def _draw_sum(draw: Random) -> WordProblem:
    name, thing = draw.choice(PEOPLE), draw.choice(THINGS)
    left, right = draw.randint(100, 999), draw.randint(100, 999)
    call = _calculate(left, "+", right)
    question = f"{name} has {left} {thing} and gets {right} more. How many {thing} has {name} now?"
    return WordProblem(question, str(call.result), (call,))


def _draw_product(draw: Random) -> WordProblem:
    thing, left, right = draw.choice(THINGS), draw.randint(12, 99), draw.randint(12, 99)
    call = _calculate(left, "*", right)
    question = f"There are {left} boxes with {right} {thing} each. How many {thing} are there?"
    return WordProblem(question, str(call.result), (call,))


def _draw_facts(draw: Random) -> tuple[str, str, dict[str, str]]:
    """A person, the city where they live, and facts of people and cities."""
    people, cities = draw.sample(PEOPLE, 3), draw.sample(CITIES, 3)
    facts = dict(zip(people, cities, strict=True)) | {city: str(draw.randint(100, 9999)) for city in cities}
    return people[0], cities[0], facts


def _draw_fact(draw: Random) -> WordProblem:
    _, city, facts = _draw_facts(draw)
    return WordProblem(f"How many people live in {city}?", facts[city], (_look_up(city, facts),), facts)


def _draw_hop(draw: Random) -> WordProblem:
    person, city, facts = _draw_facts(draw)
    calls = (_look_up(person, facts), _look_up(city, facts))
    return WordProblem(f"How many people live in the city of {person}?", facts[city], calls, facts)


def _draw_growth(draw: Random) -> WordProblem:
    _, city, facts = _draw_facts(draw)
    more = draw.randint(100, 999)
    call = _calculate(int(facts[city]), "+", more)
    question = f"How many people live in {city} when {more} more people come?"
    return WordProblem(question, str(call.result), (_look_up(city, facts), call), facts)


def _draw_room(draw: Random) -> WordProblem:
    name, number = draw.choice(PEOPLE), draw.randint(100, 9999)
    return WordProblem(f"The room of {name} is number {number}. What is the number of the room of {name}?", str(number))


KINDS: Mapping[str, Callable[[Random], WordProblem]] = {
    "sum": _draw_sum,
    "product": _draw_product,
    "fact": _draw_fact,
    "hop": _draw_hop,
    "growth": _draw_growth,
    "room": _draw_room,
}
"""They need `calculate`, `calculate`, `look_up`, `look_up` twice, both, and no tool."""


def draw_problems(seed: int, split: Split) -> Iterator[tuple[str, WordProblem]]:
    """Problems of a split with their kinds, in turn of each kind, without end; deterministic."""
    for number in count():
        kind = list(KINDS)[number % len(KINDS)]
        draw = Random(f"{seed}/{number}/{kind}")
        while (problem := KINDS[kind](draw)).split != split:
            pass
        yield kind, problem


def draw_examples(seed: int) -> dict[str, list[dict[str, Any]]]:
    """For each kind, worked examples as chat turns. A model this small follows examples of the same kind only; after
    two of them, it takes the form of a result for that of a call."""
    examples: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind, problem in islice(draw_problems(-1 - seed, "train"), EXAMPLES * len(KINDS)):
        examples[kind] += problem.chat
    return examples


def make_row(id: str, kind: str, problem: WordProblem, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The problem as a row of data, after worked examples if there are any."""
    messages = [{"role": "system", "content": SYSTEM}, *before, {"role": "user", "content": problem.question}]
    return {
        "id": id,
        "kind": kind,
        "messages": messages,
        "ground_truth": problem.answer,
        "tools": ["look_up", "calculate"],
        "tools_kwargs": {"look_up": {"create_kwargs": {"facts": dict(problem.facts)}}},
    }

"""The default demo's tasks: questions about facts that are drawn for each task, so that only a tool can tell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count, pairwise
from random import Random
from typing import Any

from gateway.types import Task as Asked
from gateway.types import ToolSpec
from trainer.demo.facts.lookup import SCHEMA
from trainer.demo.problem import HELD_OUT, Lookup, Problem, Split
from trainer.task import Task

PEOPLE = (
    "Ann",
    "Bob",
    "Cid",
    "Dora",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Olga",
    "Pia",
)
CITIES = (
    "Aden", "Basel", "Cairo", "Delhi", "Essen", "Fargo", "Ghent", "Haifa",
    "Izmir", "Jaffa", "Kyoto", "Lima", "Minsk", "Nantes", "Oslo", "Paris",
)  # fmt: skip
TOOLS = (
    ToolSpec("look_up", parameters=SCHEMA["function"]["parameters"]),
    ToolSpec("calculate", parameters={"type": "object", "properties": {"expression": {"type": "string"}}}),
)
"""As far as the demo's chat template shows them."""
DIGITS = (3, 5)
"""Lengths of answers, each as likely: numbers drawn evenly are nearly all of the longest length, which is learned."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What a kind of task is made of."""

    question: str
    facts: Mapping[str, str]
    calls: tuple[Lookup, ...]
    answer: str


def number(draw: Random) -> str:
    length = draw.randint(*DIGITS)
    return str(draw.randrange(10 ** (length - 1), 10**length))


def problems(seed: int | str, split: Split = "train", kinds: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Without end, kind after kind; the same for the same seed."""
    order = kinds or tuple(KINDS)
    for place in count():
        yield problem(seed, place, order[place % len(order)], split)


def problem(seed: int | str, place: int, kind: str, split: Split = "train") -> Problem:
    draw = Random(f"{seed}/{place}/{kind}")  # noqa: S311 - no secret
    while True:
        drawn = {**KINDS, **TRAILS}[kind](draw)
        if split == _split(drawn):
            return _problem(f"{kind}-{seed}-{place}", kind, drawn)


def _split(drawn: _Drawn) -> Split:
    told = json.dumps([drawn.question, drawn.facts], sort_keys=True)
    return "train" if sha256(told.encode()).digest()[0] % HELD_OUT else "held_out"


def _problem(id: str, kind: str, drawn: _Drawn) -> Problem:
    create: dict[str, Any] = {"look_up": {"facts": drawn.facts}}
    asked = Asked(id, tuple(tool.name for tool in TOOLS), create)
    if kind == "judged":
        asked = replace(asked, feedback="judge", feedback_args={"ground_truth": drawn.answer})
    columns = {"kind": kind, "facts": drawn.facts}
    task = Task(id, ({"role": "user", "content": drawn.question},), drawn.answer, asked, columns)
    return Problem(kind, task, drawn.calls, drawn.answer, number)


def _world(draw: Random) -> tuple[str, str, dict[str, str]]:
    """A person, the city, and facts of which theirs are the first."""
    people, cities = draw.sample(PEOPLE, 3), draw.sample(CITIES, 3)
    lives = dict(zip(people, cities, strict=True))
    return people[0], cities[0], lives | {city: number(draw) for city in cities}


def _look(name: str, facts: Mapping[str, str]) -> Lookup:
    return Lookup("look_up", {"name": name}, facts[name])


def _fact(draw: Random) -> _Drawn:
    _, city, facts = _world(draw)
    return _Drawn(f"How many people live in {city}?", facts, (_look(city, facts),), facts[city])


def _judged(draw: Random) -> _Drawn:
    _, city, facts = _world(draw)
    question = f"How many people live in {city}? You may try twice."
    return _Drawn(question, facts, (_look(city, facts),), facts[city])


def _hop(draw: Random) -> _Drawn:
    person, city, facts = _world(draw)
    calls = (_look(person, facts), _look(city, facts))
    return _Drawn(f"How many people live in the city of {person}?", facts, calls, facts[city])


def _trail(people: int, cities: int) -> Callable[[Random], _Drawn]:
    """Whoever is asked names who knows: with whom a person stays, and what a city is called by now."""

    def drawn(draw: Random) -> _Drawn:
        persons, places = draw.sample(PEOPLE, people + 2), draw.sample(CITIES, cities + 2)
        trail, others = [*persons[:people], *places[:cities]], places[cities:]
        facts = dict(pairwise(trail)) | dict(zip(persons[people:], others, strict=True))
        facts |= {city: number(draw) for city in (trail[-1], *others)}
        asked = f"the city of {trail[0]}" if people else trail[0]
        calls = tuple(_look(name, facts) for name in trail)
        return _Drawn(f"How many people live in {asked}?", facts, calls, facts[trail[-1]])

    return drawn


def _sum(draw: Random) -> _Drawn:
    answer, more = _parts(draw)
    expression = f"{int(answer) - more} + {more}"
    return _Drawn(f"What is {expression}?", {}, (Lookup("calculate", {"expression": expression}, answer),), answer)


def _move(draw: Random) -> _Drawn:
    person, city, facts = _world(draw)
    answer, more = _parts(draw)
    facts[city] = str(int(answer) - more)
    add = Lookup("calculate", {"expression": f"{facts[city]} + {more}"}, answer)
    calls = (_look(person, facts), _look(city, facts), add)
    return _Drawn(f"How many people live in the city of {person} if {more} more come?", facts, calls, answer)


def _parts(draw: Random) -> tuple[str, int]:
    """An answer, and a part of it that leaves more than it takes."""
    return number(draw), draw.randrange(10, 50)


KINDS: Mapping[str, Callable[[Random], _Drawn]] = {
    "fact": _fact,
    "sum": _sum,
    "hop": _hop,
    "move": _move,
    "judged": _judged,
}
"""They need one, one, two and three calls; `judged` needs one, and gives a second try."""
TRAILS: Mapping[str, Callable[[Random], _Drawn]] = {
    "renamed": _trail(0, 2),
    "renamed_twice": _trail(0, 3),
    "renamed_thrice": _trail(0, 4),
    "guest": _trail(2, 1),
    "guest_twice": _trail(3, 1),
}
"""They need two, three, four, three and four calls, which the question does not tell; no demonstration shows them."""

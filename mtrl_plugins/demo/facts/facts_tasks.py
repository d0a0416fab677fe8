"""Generates the default demo's tasks: questions about facts that are drawn for each task, so only a tool knows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count, pairwise
from random import Random
from typing import Any

from gateway.types import Task as SessionTask
from gateway.types import ToolSpec
from mtrl_plugins.demo.facts.lookup import SCHEMA
from mtrl_plugins.demo.problem import HELD_OUT_SHARE, ExpectedCall, Problem, Split
from trainer.rollout.task import Task

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
"""The parts of the tools' schemas that the demo's chat template shows."""
ANSWER_DIGITS = (3, 5)
"""Shortest and longest answers; each length is equally likely. Of uniform numbers, almost all have the largest length,
which a policy would learn."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task's question, facts and solution."""

    question: str
    facts: Mapping[str, str]
    calls: tuple[ExpectedCall, ...]
    answer: str


def draw_number(draw: Random) -> str:
    """Draws an answer; also the guess of a policy that calls no tool."""
    length = draw.randint(*ANSWER_DIGITS)
    return str(draw.randrange(10 ** (length - 1), 10**length))


def draw_problems(seed: int | str, split: Split = "train", kinds: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Generates problems without end, in turn of each kind; deterministic."""
    order = kinds or tuple(KINDS)
    for number in count():
        yield draw_problem(seed, number, order[number % len(order)], split)


def draw_problem(seed: int | str, number: int, kind: str, split: Split = "train") -> Problem:
    """Generates one problem; deterministic."""
    draw = Random(f"{seed}/{number}/{kind}")  # noqa: S311 - not security-relevant
    while True:
        draft = {**KINDS, **TRAILS}[kind](draw)
        if split == _split_of(draft):
            return _build_problem(f"{kind}-{seed}-{number}", kind, draft)


def _split_of(draft: _Draft) -> Split:
    content = json.dumps([draft.question, draft.facts], sort_keys=True)
    return "train" if sha256(content.encode()).digest()[0] % HELD_OUT_SHARE else "held_out"


def _build_problem(id: str, kind: str, draft: _Draft) -> Problem:
    create: dict[str, Any] = {"look_up": {"facts": draft.facts}}
    session_task = SessionTask(id, tuple(tool.name for tool in TOOLS), create)
    if kind == "judged":
        session_task = replace(session_task, feedback="judge", feedback_args={"ground_truth": draft.answer})
    columns = {"kind": kind, "facts": draft.facts}
    task = Task(id, ({"role": "user", "content": draft.question},), draft.answer, session_task, columns)
    return Problem(kind, task, draft.calls, draft.answer, draw_number)


def _draw_world(draw: Random) -> tuple[str, str, dict[str, str]]:
    """A person, their city, and facts about three people and cities."""
    people, cities = draw.sample(PEOPLE, 3), draw.sample(CITIES, 3)
    lives = dict(zip(people, cities, strict=True))
    return people[0], cities[0], lives | {city: draw_number(draw) for city in cities}


def _look_up(name: str, facts: Mapping[str, str]) -> ExpectedCall:
    return ExpectedCall("look_up", {"name": name}, facts[name])


def _draw_fact(draw: Random) -> _Draft:
    _, city, facts = _draw_world(draw)
    return _Draft(f"How many people live in {city}?", facts, (_look_up(city, facts),), facts[city])


def _draw_judged(draw: Random) -> _Draft:
    _, city, facts = _draw_world(draw)
    question = f"How many people live in {city}? You may try twice."
    return _Draft(question, facts, (_look_up(city, facts),), facts[city])


def _draw_hop(draw: Random) -> _Draft:
    person, city, facts = _draw_world(draw)
    calls = (_look_up(person, facts), _look_up(city, facts))
    return _Draft(f"How many people live in the city of {person}?", facts, calls, facts[city])


def _trail_drawer(people: int, cities: int) -> Callable[[Random], _Draft]:
    """Each lookup names the next: the person that someone stays with, or the new name of a city."""

    def draw_trail(draw: Random) -> _Draft:
        drawn_people, drawn_cities = draw.sample(PEOPLE, people + 2), draw.sample(CITIES, cities + 2)
        trail, others = [*drawn_people[:people], *drawn_cities[:cities]], drawn_cities[cities:]
        facts = dict(pairwise(trail)) | dict(zip(drawn_people[people:], others, strict=True))
        facts |= {city: draw_number(draw) for city in (trail[-1], *others)}
        place = f"the city of {trail[0]}" if people else trail[0]
        calls = tuple(_look_up(name, facts) for name in trail)
        return _Draft(f"How many people live in {place}?", facts, calls, facts[trail[-1]])

    return draw_trail


def _draw_sum(draw: Random) -> _Draft:
    answer, summand = _draw_summands(draw)
    expression = f"{int(answer) - summand} + {summand}"
    return _Draft(
        f"What is {expression}?", {}, (ExpectedCall("calculate", {"expression": expression}, answer),), answer
    )


def _draw_move(draw: Random) -> _Draft:
    person, city, facts = _draw_world(draw)
    answer, summand = _draw_summands(draw)
    facts[city] = str(int(answer) - summand)
    add = ExpectedCall("calculate", {"expression": f"{facts[city]} + {summand}"}, answer)
    calls = (_look_up(person, facts), _look_up(city, facts), add)
    return _Draft(f"How many people live in the city of {person} if {summand} more come?", facts, calls, answer)


def _draw_summands(draw: Random) -> tuple[str, int]:
    """An answer, and a smaller summand of it."""
    return draw_number(draw), draw.randrange(10, 50)


KINDS: Mapping[str, Callable[[Random], _Draft]] = {
    "fact": _draw_fact,
    "sum": _draw_sum,
    "hop": _draw_hop,
    "move": _draw_move,
    "judged": _draw_judged,
}
"""The kinds of the default job. They need one, one, two, three and one calls; `judged` allows a second try."""
TRAILS: Mapping[str, Callable[[Random], _Draft]] = {
    "renamed": _trail_drawer(0, 2),
    "renamed_twice": _trail_drawer(0, 3),
    "renamed_thrice": _trail_drawer(0, 4),
    "guest": _trail_drawer(2, 1),
    "guest_twice": _trail_drawer(3, 1),
}
"""Kinds that no demonstration shows. They need two, three, four, three and four calls; the question does not say how
many."""

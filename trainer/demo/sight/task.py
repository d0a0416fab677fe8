"""Questions that take two looks: one at the house, to see which window is lit, and one through that window."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any

from gateway.types import Image, ToolSpec
from gateway.types import Task as Asked
from trainer.demo.facts.task import CITIES, PEOPLE
from trainer.demo.problem import HELD_OUT, Lookup, Problem, Split
from trainer.demo.sight.house import COLOURS, House, inside, outside
from trainer.demo.sight.look import SCHEMA
from trainer.task import Task

KIND = "lit"
_TEXT: dict[str, Any] = {"type": "string"}
TOOLS = (
    ToolSpec("look", parameters=SCHEMA["function"]["parameters"]),
    ToolSpec("zoom", parameters={"type": "object", "properties": {"house": _TEXT, "window": _TEXT}}),
)
"""As far as the demo's chat template shows them."""


def problem(seed: int | str, place: int, kind: str = KIND, split: Split = "train") -> Problem:
    """Of the one kind that there is."""
    draw = Random(f"{seed}/{place}/{kind}")  # noqa: S311 - no secret
    while True:
        name = f"{draw.choice(PEOPLE)} {draw.choice(CITIES)} {draw.randrange(10)}"
        if split == _split(name):
            return _problem(f"{kind}-{seed}-{place}", name)


def guess(draw: Random) -> str:
    return draw.choice(tuple(COLOURS))


def _split(name: str) -> Split:
    return "train" if sha256(name.encode()).digest()[0] % HELD_OUT else "held_out"


def _problem(id: str, name: str) -> Problem:
    house = House.named(name)
    seen, near = Image(outside(name), "image/png"), Image(inside(name, house.lit), "image/png")
    calls = Lookup("look", {"house": name}, seen), Lookup("zoom", {"house": name, "window": house.lit}, near)
    asked = Asked(id, tuple(tool.name for tool in TOOLS))
    question = {"role": "user", "content": f"What is the colour of the lit room of {name}?"}
    columns = {"kind": KIND, "house": name, "window": house.lit}
    return Problem(KIND, Task(id, (question,), house.answer, asked, columns), calls, house.answer, guess)

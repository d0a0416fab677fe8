"""Generates the vision demo's tasks, which need two calls: `look` shows the lit window, `zoom` the room behind it."""

from __future__ import annotations

from hashlib import sha256
from random import Random
from typing import Any

from gateway.types import Image, ToolSpec
from gateway.types import Task as SessionTask
from mtrl_plugins.demo.facts.facts_tasks import CITIES, PEOPLE
from mtrl_plugins.demo.problem import HELD_OUT_SHARE, ExpectedCall, Problem, Split
from mtrl_plugins.demo.sight.house import COLOURS, House, draw_inside, draw_outside
from mtrl_plugins.demo.sight.look import SCHEMA
from trainer.rollout.task import Task

KIND = "lit"
_TEXT: dict[str, Any] = {"type": "string"}
TOOLS = (
    ToolSpec("look", parameters=SCHEMA["function"]["parameters"]),
    ToolSpec("zoom", parameters={"type": "object", "properties": {"house": _TEXT, "window": _TEXT}}),
)
"""The parts of the tools' schemas that the demo's chat template shows."""


def draw_problem(seed: int | str, number: int, kind: str = KIND, split: Split = "train") -> Problem:
    """Generates one problem of the only kind; deterministic."""
    draw = Random(f"{seed}/{number}/{kind}")  # noqa: S311 - not security-relevant
    while True:
        name = f"{draw.choice(PEOPLE)} {draw.choice(CITIES)} {draw.randrange(10)}"
        if split == _split_of(name):
            return _build_problem(f"{kind}-{seed}-{number}", name)


def draw_guess(draw: Random) -> str:
    """Guesses a colour."""
    return draw.choice(tuple(COLOURS))


def _split_of(name: str) -> Split:
    return "train" if sha256(name.encode()).digest()[0] % HELD_OUT_SHARE else "held_out"


def _build_problem(id: str, name: str) -> Problem:
    house = House.from_name(name)
    outside, inside = Image(draw_outside(name), "image/png"), Image(draw_inside(name, house.lit), "image/png")
    calls = (
        ExpectedCall("look", {"house": name}, outside),
        ExpectedCall("zoom", {"house": name, "window": house.lit}, inside),
    )
    session_task = SessionTask(id, tuple(tool.name for tool in TOOLS))
    question = {"role": "user", "content": f"What is the colour of the lit room of {name}?"}
    columns = {"kind": KIND, "house": name, "window": house.lit}
    return Problem(KIND, Task(id, (question,), house.answer, session_task, columns), calls, house.answer, draw_guess)

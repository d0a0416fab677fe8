"""Trainings as somebody types them: a tiny run file, and what the command says to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from tests.trainer.train.jobs import SMALL, model
from trainer.run.history import history

Run = Callable[..., str]
TINY: dict[str, Any] = {
    **SMALL, "tools": "tools", "kinds": ["fact"], "prompts": 2, "n": 2, "steps": 4, "record": False,
    "evaluation": {"every": 0},
}  # fmt: skip
MACHINE = ("time/", "engine/")
NUMBERS = count()
NATIVE = {
    "tools/calculator.py": 'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    return "0"\n',
    "tools/tools.yaml": "tools: [{class_name: trainer.demo.facts.lookup.LookUp}, {function: calculator:calculate}]\n",
}
"""Facts need no server, and none has to be started for each of these tests."""


def config(**changes: Any) -> str:
    Path("tools").mkdir(exist_ok=True)
    for file, text in NATIVE.items():
        Path(file).write_text(text)
    Path("run.yaml").write_text(json.dumps({**TINY, "model": str(model()), **changes}))
    return "run.yaml"


def mine(body: str, **more: Any) -> dict[str, Any]:
    """A reward function of the user's own."""
    name = f"rewards_{next(NUMBERS)}.py"  # Of a module's name there is one in a process.
    Path(name).write_text(f"import math, time\n\n\ndef mine(attempt):\n    {body}\n")
    return {"components": {"mine": {"function": f"{name}:mine", **more}}}


def measured(out: str | Path) -> list[dict[str, float]]:
    lines = history(Path(out) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


def checkpoints(out: str | Path) -> list[str]:
    return sorted(folder.name for folder in (Path(out) / "checkpoints").glob("*"))

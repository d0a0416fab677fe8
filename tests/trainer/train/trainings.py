"""Runs the training command with a tiny run file, and returns its output."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.metrics_page import is_repeated
from tests.trainer.train.jobs import SMALL, demo_model
from trainer.cli import app
from trainer.storage.run_files import read_metrics

Run = Callable[..., str]
TINY: dict[str, Any] = {
    **SMALL, "tools": "tools", "demo": {"kinds": ["fact"]}, "prompts": 2, "n": 2, "steps": 4, "record": False,
    "evaluation": {"every": 0},
}  # fmt: skip
NUMBERS = count()
NATIVE = {
    "tools/calculator.py": 'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    return "0"\n',
    "tools/tools.yaml": (
        "tools: [{class_name: mtrl_plugins.demo.facts.lookup.LookUp}, {function: calculator:calculate}]\n"
    ),
}
"""Facts need no server, and none has to be started for each of these tests."""


def write_tools(folder: Path) -> str:
    """The folder of the native tools."""
    (folder / "tools").mkdir(exist_ok=True)
    for file, text in NATIVE.items():
        (folder / file).write_text(text)
    return str(folder / "tools")


def string_console() -> Console:
    return Console(file=io.StringIO(), width=200)


def write_config(**changes: Any) -> str:
    write_tools(Path())
    Path("run.yaml").write_text(json.dumps({**TINY, "model": str(demo_model()), **changes}))
    return "run.yaml"


def run_in(folder: Path, **changes: Any) -> Path:
    """A run of a folder's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["--config", write_config(**changes), "--out", "r"])
        assert done.exit_code == 0, done.output
    return folder / "r"


def user_reward(body: str, **more: Any) -> dict[str, Any]:
    """A reward function of the user's own."""
    name = f"rewards_{next(NUMBERS)}.py"  # Of a module's name there is one in a process.
    Path(name).write_text(f"import math, time\n\n\ndef mine(attempt):\n    {body}\n")
    return {"components": {"mine": {"function": f"{name}:mine", **more}}}


def read_run_metrics(out: str | Path) -> list[dict[str, float]]:
    lines = read_metrics(Path(out) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if is_repeated(name)} for line in lines]


def list_checkpoints(out: str | Path) -> list[str]:
    return sorted(folder.name for folder in (Path(out) / "checkpoints").glob("*"))


def read_metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """The numbers that are not the machine's, line by line: a step that was written twice stands there twice."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if is_repeated(name)} for line in lines]


def count_lines(run: Path) -> int:
    """The steps of a run that may not have begun."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0

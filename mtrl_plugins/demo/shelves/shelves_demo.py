"""The demo of made tasks: rows that `make-tasks` made from the server of shelves, and a tiny model for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from gateway.types import Task as SessionTask
from gateway.types import ToolSpec
from mtrl_plugins.demo.demos import Demo
from mtrl_plugins.demo.facts import facts_demo
from mtrl_plugins.demo.problem import ExpectedCall, Problem, Split
from mtrl_plugins.demo.shelves.shelf_server import list_tools
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe, WarmStartSetup
from mtrl_plugins.task_maker.values import split_of
from trainer.rollout.task import Task
from trainer.template import Template

FOLDER = Path(__file__).parent
FILES: Mapping[Split, str] = {"train": "tasks.jsonl", "held_out": "tasks.held_out.jsonl"}
KINDS = ("level 1", "level 2", "level 3")
TOOLS = tuple(ToolSpec(tool["name"], parameters=tool["inputSchema"]) for tool in list_tools())
DONE = "done"
"""The last words of a demonstration whose task is graded by the state alone."""
TRAINING_CONVERSATIONS = 300
_NUMBER = re.compile(r"\d{3}")


@cache
def read_rows(split: Split, kind: str) -> tuple[Mapping[str, Any], ...]:
    """The rows of a split and a kind, as `make-tasks` wrote them."""
    lines = (FOLDER / FILES[split]).read_text(encoding="utf-8").splitlines()
    return tuple(row for row in map(json.loads, lines) if row["kind"] == kind)


def draw_problem(seed: int | str, number: int, kind: str, split: Split = "train") -> Problem:
    """One of the rows, each once before any comes again; deterministic."""
    rows = read_rows(split, kind)
    turn = Random(f"{seed}/{kind}").randrange(len(rows))  # noqa: S311 - not security-relevant
    return _build_problem(rows[(turn + number // len(KINDS)) % len(rows)], f"{seed}-{number}")


def draw_problems(seed: int | str, kinds: tuple[str, ...] = KINDS) -> Iterator[Problem]:
    """Demonstrations without end: training rows with other numbers, so that numbers are copied and not remembered."""
    for number in count():
        draw = Random(f"{seed}/{number}/demonstration")  # noqa: S311 - not security-relevant
        row = draw.choice(read_rows("train", kinds[number % len(kinds)]))
        yield _build_problem(_renumber(row, draw), f"{seed}-{number}")


def _renumber(row: Mapping[str, Any], draw: Random) -> dict[str, Any]:
    """A row with another number for each; none of them belongs to the held-out tasks."""
    numbers: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        if match[0] not in numbers:
            numbers[match[0]] = next(new for new in _draw_numbers(draw) if new not in numbers.values())
        return numbers[match[0]]

    fields = {name: row[name] for name in ("prompt", "gold", "ground_truth", "kind", "id") if name in row}
    changed: dict[str, Any] = json.loads(_NUMBER.sub(other, json.dumps(fields)))
    return changed


def _draw_numbers(draw: Random) -> Iterator[str]:
    while True:
        number = draw.randint(100, 999)
        if split_of(number) == "train":
            yield str(number)


def draw_guess(draw: Random) -> str:
    """What a policy says that calls no tool."""
    return str(draw.randint(100, 999))


def _build_problem(row: Mapping[str, Any], suffix: str) -> Problem:
    calls = tuple(ExpectedCall(call["tool"], call["arguments"], call["result"]) for call in row["gold"])
    id, truth = f"{row['id']}-{suffix}", row.get("ground_truth")
    session_task = SessionTask(id, tuple(tool.name for tool in TOOLS), hash_state="end_state" in row)
    task = Task(id, ({"role": "user", "content": row["prompt"]},), truth, session_task, row)
    return Problem(row["kind"], task, calls, truth or DONE, draw_guess)


def build_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model with random weights, as `save_pretrained` does."""
    tokenizer = facts_demo.train_tokenizer(facts_demo.SPECIAL_TOKENS, facts_demo.CHAT_TEMPLATE, _training_texts)
    return facts_demo.save_model(folder, tokenizer, seed)


def _training_texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    return facts_demo.render_problems(tokenizer, islice(draw_problems("tokenizer"), TRAINING_CONVERSATIONS), TOOLS)


def build_warm_start(folder: Path) -> WarmStartSetup:
    """Sets up the warm start of the model in a folder."""
    writer = DemonstrationWriter(Template.load(folder), TOOLS)
    return WarmStartSetup(writer, draw_problems)


HABIT_RECIPE = Recipe(demo="shelves", kinds=KINDS, skill_steps=2000)
DEMO = Demo(KINDS, draw_problem, {"habit": HABIT_RECIPE}, build_model, build_warm_start)

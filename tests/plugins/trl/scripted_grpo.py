"""Runs of `GRPO` whose policy writes prepared turns, so that tools are called and rewards known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mtrl_plugins.trl.api import GRPO, TrainOutput
from tests.trainer.policy_scripts import encode_turns
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.train.job import Job

Turns = Sequence[Sequence[str]]
"""The texts of each of a group's rollouts; a text that ends with `...` is cut off there."""
ARGS: dict[str, Any] = {
    "output_dir": "run",
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 400,
}


def script_policy(monkeypatch: pytest.MonkeyPatch, turns: Turns) -> list[ScriptedEngine]:
    """Replaces the engine of runs; those that are made are in the list."""
    made: list[ScriptedEngine] = []

    def make_engine(job: Job, *_: object, **__: object) -> ScriptedEngine:
        numbers: dict[str, int] = {}

        def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
            index = int(key.rpartition("/")[2].partition(".")[0]) % len(turns)
            number = numbers[key] = numbers.get(key, -1) + 1
            text = turns[index][number]
            return encode_turns(job.template, text.removesuffix("..."), end=not text.endswith("..."))[0]

        made.append(ScriptedEngine(script))
        return made[-1]

    monkeypatch.setattr(Job, "make_engine", make_engine)
    return made


Train = Callable[..., TrainOutput]


def make_trainer(model: Path, rows: Any, rewards: Any, **kwargs: Any) -> GRPO:
    """A trainer of one step with a group of four; `args` are added to those."""
    args = {**ARGS, **kwargs.pop("args", {})}
    return GRPO(model=str(model), reward_funcs=rewards, args=args, train_dataset=rows, **kwargs)


PRICES = {"apple": 2, "pear": 3}


def price(item: str) -> int:
    """Looks up what one piece of an item costs.

    Args:
        item: the name of the item, in lower case

    Returns:
        The price of one piece, in coins.
    """
    return PRICES[item]


class Recorder:
    """A reward function that keeps its arguments, and gives each completion its number; nothing to the first."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        self.calls.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs})
        return [float(index) if index else None for index in range(len(prompts))]


class Safe:
    """An environment with state."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.rows: list[dict[str, Any]] = []

    def reset(self, **row: Any) -> str:
        self.rows.append(row)
        self.code, self.tries = row.get("code", 7), 0
        return "The dial shows 0."

    def dial(self, number: int) -> str:
        """Turns the dial.

        Args:
            number: from 0 to 9

        Returns:
            What is heard.
        """
        self.tries += 1
        return "click" if number == self.code else "nothing"

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return float(self.tries)

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

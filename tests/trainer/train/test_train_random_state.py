"""Global random states are saved and restored with a run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import string_console, write_tools
from trainer.train.start import train

LUCK = """
import random
import numpy
import torch

def luck(attempt):
    return random.randrange(1000) + numpy.random.randint(1000) + int(torch.randint(1000, ()))
"""


async def test_random_reward_is_the_same_after_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """It is measured and rewards nothing: which rollout has which number is up to who comes first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(LUCK)
    write_tools(tmp_path)
    rewards = {"outcome": {"function": "outcome"}, "luck": {"function": "own.py:luck", "weight": 0}}
    settings = small_job(
        tools="tools", demo={"kinds": ["fact"]}, steps=3, evaluation={"every": 0}, reward={"components": rewards}
    )
    run, console = tmp_path / "run", string_console()
    await train(settings, run, console)

    def luck() -> list[float]:
        return [json.loads(line)["reward/luck"] for line in (run / "metrics.jsonl").read_text().splitlines()]

    whole = luck()
    assert len({*whole}) == 3
    shutil.rmtree(run / "checkpoints/000003")
    random.seed(0)
    await train(settings, run, console, resume=True)
    assert luck() == whole

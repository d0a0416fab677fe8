"""A short run learns, and its every loss is known.

Rounding differs from processor to processor. Eight steps on random weights make next to nothing of it, and so their
losses are told to four digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrl_plugins.demo.facts.facts_demo import build_model
from tests.trainer.train.jobs import SMALL
from tests.trainer.train.trainings import string_console
from trainer.storage.run_files import METRICS_FILE, StepMetrics, read_metrics
from trainer.train.settings import TrainSettings
from trainer.train.start import train

REFERENCE_JOB: dict[str, Any] = {
    "steps": 8,
    "n": 8,
    "record": False,
    "reward": {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:sevenths"}}},
    "limits": SMALL["limits"] | {"turn_tokens": 16},
    "update": {"lr": 1e-2, "warmup_steps": 1, "lr_scheduler": "linear", "decay_steps": 8, "epochs": 2},
    "evaluation": {"every": 0},
}
LOSSES = [-0.0635213, 0.0022859, -0.0620649, -0.0224107, -0.0050541, -0.0055789, -0.0162345, -0.0510751]
ENTROPY, GRAD_NORM = 6.1260, 0.36153
"""After the last step."""


async def train_job(model: Path, job: dict[str, Any], folder: Path) -> list[StepMetrics]:
    settings = TrainSettings.model_validate(SMALL | job | {"model": str(model)})
    await train(settings, folder, string_console())
    return read_metrics(folder / METRICS_FILE)


async def test_losses_of_a_short_run_are_the_known_ones(tmp_path: Path, one_thread: None) -> None:
    steps = await train_job(build_model(tmp_path / "model"), REFERENCE_JOB, tmp_path / "run")
    assert [step["loss"] for step in steps] == pytest.approx(LOSSES, rel=1e-4, abs=1e-6)
    assert steps[-1]["entropy"] == pytest.approx(ENTROPY, rel=1e-4)
    assert steps[-1]["update/grad_norm"] == pytest.approx(GRAD_NORM, rel=1e-4)
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])

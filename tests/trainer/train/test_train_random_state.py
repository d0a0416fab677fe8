"""Global random states are saved and restored with a run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import torch

from trainer.policy import rng


def draw_numbers() -> list[float]:
    return [random.random(), random.gauss(), *numpy.random.normal(size=3), *torch.rand(3).tolist()]


def test_random_states_are_restored(tmp_path: Path) -> None:
    rng.seed_all(7)
    draw_numbers()
    rng.save_state(tmp_path)
    expected = draw_numbers()
    rng.seed_all(8)
    assert draw_numbers() != expected
    rng.restore_state(tmp_path)
    assert draw_numbers() == expected

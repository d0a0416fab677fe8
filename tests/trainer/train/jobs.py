"""A small job on the demo's tasks, with a barely trained model."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from trainer.train.settings import TrainSettings

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "tools": str(ROOT / "tool_configs"),
    "data": "demo",
    "steps": 3,
    "prompts": 4,
    "n": 4,
    "kinds": ("fact", "sum"),
    "record": True,
    "reward": {"components": {"outcome": {"function": "outcome"}}},
    "limits": {
        "assistant_turns": 4, "user_turns": 2, "tool_calls": 4, "turn_tokens": 24, "rollout_tokens": 160, "wall_s": 60,
    },
    "algorithm": {"name": "dapo"},
    "update": {"lr": 1e-3, "warmup": 1, "steps": 3},
    "evaluation": {"every": 2, "few": 4, "rows": 8},
    "checkpoint": {"every": 1},
}  # fmt: skip


@cache
def demo_model() -> Path:
    """Shown enough to be right at times: there must be something to compare."""
    from trainer.demo.model_cache import find_or_build_model
    from trainer.demo.warm_start import Recipe

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kept = Path(os.environ.get("MTRL_TEST_MODELS") or mkdtemp(prefix="mtrl-models-"))
    try:
        return find_or_build_model(Recipe(skill_steps=200, habit_steps=0, kinds=("fact", "sum")), kept)
    finally:
        torch.set_num_threads(before)


def small_job(**changes: Any) -> TrainSettings:
    return TrainSettings.model_validate({**SMALL, "model": str(demo_model()), **changes})

"""A small job on the demo's tasks, with a barely trained model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.shared_folders import build_once
from tests.trainer.native_tools import native_tools
from trainer.train.settings import TrainSettings

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "tools": native_tools(),
    "data": "demo",
    "steps": 3,
    "prompts": 4,
    "n": 4,
    "demo": {"kinds": ("fact", "sum")},
    "record": True,
    "reward": {"components": {"outcome": {"function": "outcome"}}},
    "limits": {
        "assistant_turns": 4, "user_turns": 2, "tool_calls": 4, "turn_tokens": 24, "rollout_tokens": 160,
        "timeout_s": 60,
    },
    "algorithm": {"name": "dapo"},
    "update": {"lr": 1e-3, "warmup_steps": 1, "lr_scheduler": "linear", "decay_steps": 3},
    "evaluation": {"every": 2, "rows": 4, "final_rows": 8},
    "checkpoint": {"every": 1},
}  # fmt: skip


@cache
def demo_model() -> Path:
    """Shown enough to be right at times: there must be something to compare."""
    from mtrl_plugins.demo.model_cache import find_or_build_model, recipe_digest
    from mtrl_plugins.demo.warm_start import Recipe

    recipe = Recipe(skill_steps=180, habit_steps=0, kinds=("fact", "sum"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (model,) = build_once(
            f"demo-model-{recipe_digest(recipe)}", lambda folder: find_or_build_model(recipe, folder)
        ).iterdir()
    finally:
        torch.set_num_threads(before)
    return model


def small_job(**changes: Any) -> TrainSettings:
    return TrainSettings.model_validate({**SMALL, "model": str(demo_model()), **changes})

"""Rows of environments with `reset` and `step`: each is a seed. They are made without the environment."""

from __future__ import annotations

from gateway.errors import ConfigError
from mtrl_plugins.environments.environment_rows import SPLITS
from mtrl_plugins.environments.settings import EpisodeSettings
from trainer.data.row_media import Row

EVAL_SEEDS = 1_000_000_000
"""The first seed of held-out tasks, so far from those of training that they never meet."""
MAX_SEED = 2**31


def make_rows(settings: EpisodeSettings, name: str) -> list[Row] | None:
    """The rows that `name` means as `data`: `gymnasium` or `gymnasium:eval`; None if it means something else."""
    framework, _, split = name.partition(":")
    if framework != settings.framework:
        return None
    split = split or SPLITS[0]
    if split not in SPLITS:
        remedy = f"write {framework} or {framework}:eval"
        raise ConfigError(f"has no split {split!r}", file=name, field="data", remedy=remedy)
    count = settings.n_tasks if split == SPLITS[0] else settings.n_eval_tasks
    first = settings.first_seed + (0 if split == SPLITS[0] else EVAL_SEEDS)
    if settings.first_seed + settings.n_tasks > EVAL_SEEDS or first + count > MAX_SEED:
        problem, remedy = "and n_tasks reach the seeds of held-out tasks", f"stay below {EVAL_SEEDS}"
        raise ConfigError(problem, field=f"{framework}.first_seed", remedy=remedy)
    prompt = settings.prompt if settings.prompt is not None else default_prompt(settings)
    return [
        {"id": f"{split}-{seed}", "prompt": prompt, "environment": {"seed": seed}}
        for seed in range(first, first + count)
    ]


def default_prompt(settings: EpisodeSettings) -> str:
    """How to act, in words; the environment itself says the rest."""
    name = "an environment" if settings.framework == "openenv" else settings.environment
    if settings.actions == "text":
        return f"You are in {name}. Each of your messages is one action; nothing else is read.\n\n"
    return f"You are in {name}. Act by calling a tool, once in each turn, until the episode is over.\n\n"

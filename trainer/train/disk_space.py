"""Forecasts the disk space that a run's checkpoints will take."""

from __future__ import annotations

import shutil
from pathlib import Path

from trainer.policy.adapter_size import count_adapter_parameters
from trainer.policy.memory_parts import GIB
from trainer.policy.meta_model import load_meta_model
from trainer.policy.settings import UpdateSettings
from trainer.train.settings import TrainSettings

FLOAT_BYTES = 4


def forecast_checkpoints(settings: TrainSettings, model: Path, parameters: int, folder: Path) -> tuple[str, str] | None:
    """A problem and its remedy if a run's checkpoints will not fit on the disk."""
    size = estimate_checkpoint(settings.update, model, parameters)
    kept = settings.checkpoint.keep + bool(settings.evaluation.every)
    needed, free = (kept + 1) * size, _free_bytes(folder)
    if needed <= free:
        return None
    best = ", the best one" if settings.evaluation.every else ""
    problem = (
        f"checkpoints will take up to {needed / GIB:.1f} GiB: {size / GIB:.1f} GiB for each of the latest"
        f" {settings.checkpoint.keep}{best} and the one that is being written;"
        f" {free / GIB:.1f} GiB are free at {folder}"
    )
    lower = "lower `checkpoint.keep`, " if settings.checkpoint.keep > 2 else ""
    return problem, f"{lower}free some space, or name a folder on another disk with --out"


def estimate_checkpoint(update: UpdateSettings, model: Path, parameters: int) -> int:
    """Bytes of weights and two optimizer moments in float32; with LoRA only those of the adapters."""
    trained = count_adapter_parameters(load_meta_model(model), update) if update.lora else parameters
    critic = parameters if update.critic else 0
    return 3 * FLOAT_BYTES * (trained + critic)


def _free_bytes(folder: Path) -> int:
    """Free bytes where the folder is, or will be."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free

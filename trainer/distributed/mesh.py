"""How many ranks train, and how the weights are split over them."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.distributed.errors import RankError
from trainer.distributed.rank_environment import detect_environment
from trainer.distributed.settings import DistributedSettings
from trainer.policy.meta_model import load_meta_model


def count_ranks(settings: DistributedSettings) -> int:
    """The ranks that a launcher started, or that the settings ask for."""
    environment = detect_environment()
    return environment.size if environment else settings.ranks


def count_shards(settings: DistributedSettings, model: Path) -> int:
    """The GPUs that one copy of the weights is split over; 1 without GPUs, since ranks then share their memory.

    Raises PolicyError if the ranks or the model cannot be split so.
    """
    mesh = find_mesh(settings, count_ranks(settings))
    if settings.tensor > 1:
        from trainer.distributed.tensor_parallel import find_styles

        find_styles(load_meta_model(model), settings.tensor)
    return mesh["shard"] * mesh["tensor"] if torch.cuda.is_available() else 1


def find_mesh(settings: DistributedSettings, ranks: int) -> dict[str, int]:
    """The sizes of the mesh's dimensions: copies of the weights, ranks that share one by rows, and by matrices."""
    tensor = settings.tensor
    if ranks % tensor:
        problem = f"`distributed.tensor: {tensor}` does not divide {ranks} ranks"
        raise RankError(problem, f"use a multiple of {tensor} ranks, or leave `distributed.tensor` out")
    shard = settings.shard or ranks // tensor
    if ranks % (shard * tensor):
        named = f"`distributed.shard: {shard}`" + (f" times `distributed.tensor: {tensor}`" if tensor > 1 else "")
        remedy = f"use a multiple of {shard * tensor} ranks, or leave `distributed.shard` out"
        raise RankError(f"{named} does not divide {ranks} ranks", remedy)
    return {"replicate": ranks // (shard * tensor), "shard": shard, "tensor": tensor}

"""Settings of training with several ranks."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from gateway.config.base import FrozenModel
from trainer.distributed.errors import RankError
from trainer.distributed.rank_environment import detect_environment

DISK_TIMEOUT_S = 3600.0
"""Seconds that ranks may take to write a checkpoint beside training, or to read one: a shared disk may be slow."""


class DistributedSettings(FrozenModel):
    """Training on several GPUs: processes (ranks) that share the model's weights, gradients and optimizer."""

    ranks: PositiveInt = 1
    """Processes that train together on this machine, each on its own GPU if there are any; or `--ranks N`. Under
    torchrun and srun their environment counts instead. A run may be resumed with another number."""
    shard: PositiveInt | None = None
    """Ranks that one copy of the weights is split over, for each part that `tensor_parallel` makes; by default all
    of them. With fewer, such as the GPUs of a machine, every group of so many ranks has a copy, and only gradients
    travel between groups."""
    tensor_parallel: PositiveInt = 1
    """Tensor parallelism: ranks, on GPUs of one machine, that compute the same rows together, each with a part of every
    matrix and of the attention heads. Helps where a layer's gathered weights do not fit a device."""
    context_parallel: PositiveInt = 1
    """Context parallelism (Ulysses): ranks that share every row, each with a part of its tokens, or in attention of its
    heads. Helps where a row's activations do not fit a device."""
    expert_parallel: bool = False
    """Expert parallelism: shards every layer's experts over ranks; they get tokens from all ranks, instead of each rank
    gathering all experts for its own."""
    offload: bool = False
    """Keeps each rank's part of weights, gradients and optimizer in the host's memory; a layer's weights come to the
    GPU for its own computation, and the optimizer steps on the CPU. Slower, for models that do not fit otherwise."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that ranks wait for each other, and that a rank may show no sign of life, before the run ends with the
    name of the rank that is late."""
    restarts: NonNegativeInt = 3
    """How often `--ranks N` starts all ranks again, from the latest checkpoint, after one is lost, or rank 0 is killed;
    only restarts without a new checkpoint in between count. Other launchers have a setting of their own."""

    @property
    def row_ranks(self) -> int:
        """The ranks that compute the same rows."""
        return self.tensor_parallel * self.context_parallel


def count_ranks(settings: DistributedSettings) -> int:
    """The ranks that a launcher started, or that the settings ask for."""
    environment = detect_environment()
    return environment.size if environment else settings.ranks


def count_shards(settings: DistributedSettings, model: Path) -> int:
    """The GPUs that one copy of the weights is split over; 1 without GPUs, since ranks then share their memory.

    Raises PolicyError if the ranks or the model cannot be split so.
    """
    import torch  # Settings are read before anything heavy is imported.

    mesh = find_mesh(settings, ranks := count_ranks(settings))
    if settings.row_ranks > 1 or settings.expert_parallel:
        from trainer.distributed.sharded_model import require_divisible
        from trainer.policy.memory_parts import load_meta_model

        require_divisible(load_meta_model(model), settings, ranks)
    return mesh["shard"] * mesh["tensor"] if torch.cuda.is_available() else 1


def find_mesh(settings: DistributedSettings, ranks: int) -> dict[str, int]:
    """The sizes of the mesh's dimensions: copies of the weights, ranks that share one by rows, and by matrices."""
    tensor = settings.tensor_parallel
    if ranks % tensor:
        problem = f"`distributed.tensor_parallel: {tensor}` does not divide {ranks} ranks"
        raise RankError(problem, f"use a multiple of {tensor} ranks, or leave `distributed.tensor_parallel` out")
    shard = settings.shard or ranks // tensor
    if ranks % (shard * tensor):
        named = f"`distributed.shard: {shard}`" + (
            f" times `distributed.tensor_parallel: {tensor}`" if tensor > 1 else ""
        )
        remedy = f"use a multiple of {shard * tensor} ranks, or leave `distributed.shard` out"
        raise RankError(f"{named} does not divide {ranks} ranks", remedy)
    if ranks % settings.row_ranks:
        problem = f"`distributed.context_parallel: {settings.context_parallel}` does not divide {ranks // tensor} ranks"
        remedy = f"use a multiple of {settings.row_ranks} ranks, or leave `distributed.context_parallel` out"
        raise RankError(problem, remedy)
    if settings.expert_parallel and ranks == 1:
        problem = "`distributed.expert_parallel` shards experts over ranks, and there is one"
        raise RankError(problem, "raise `distributed.ranks`, or leave `distributed.expert_parallel` out")
    if settings.expert_parallel and (shard < ranks or settings.offload):
        problem = "`distributed.expert_parallel` works with neither copies of the weights nor offloading"
        remedy = "leave `distributed.shard`, `tensor_parallel` and `offload` out, or `expert_parallel`"
        raise RankError(problem, remedy)
    return {"replicate": ranks // (shard * tensor), "shard": shard, "tensor": tensor}

"""Memory per device: of a trainer's rank with sharded weights, and of a server with what is left for its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mtrl_plugins.plan.devices import Device
from trainer.policy.memory_parts import MemoryPart, MemoryPlan, load_meta_model
from trainer.policy.memory_plan import (
    BUCKET_BYTES,
    FLOAT_BYTES,
    GATHERED_LAYERS,
    kv_bytes_per_token,
    plan_training,
    plan_update_pass,
    weight_bytes,
)
from trainer.policy.placement import MAX_FRACTION, SERVER_OVERHEAD
from trainer.train.settings import TrainSettings

HALF_BYTES = 2
"""Of a number in bfloat16, in which servers have weights, keys and values."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a plan needs to know of a model."""

    numbers: int
    """Parameters; of a mixture of experts all of them, as if all were used for each token."""
    layers: int
    kv_bytes: int
    """Bytes of a token's keys and values in bfloat16."""
    trained: int
    """Parameters with a gradient: all, or those of adapters."""
    parts: tuple[MemoryPart, ...]
    """Weights, gradients and optimizer in one piece."""
    passes: tuple[MemoryPart, ...]
    """What an update needs besides these, on each rank."""

    @property
    def server_bytes(self) -> int:
        """The weights of a server."""
        return HALF_BYTES * self.numbers


def measure_model(folder: Path, settings: TrainSettings) -> ModelSize:
    """Reads a model's shapes; loads no weights."""
    model, update = load_meta_model(folder), settings.update
    numbers = weight_bytes(model) // FLOAT_BYTES
    parts = tuple(plan_training(model, update, settings.algorithm))
    adapters = [part.size for part in parts if part.name == "adapters"]
    trained = sum(adapters) // (4 * FLOAT_BYTES) if adapters else numbers
    passes = plan_update_pass(model, update, max(update.tokens, settings.limits.rollout_tokens))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    kv_bytes = kv_bytes_per_token(model) * HALF_BYTES // FLOAT_BYTES
    return ModelSize(numbers, layers, kv_bytes, trained, parts, tuple(passes))


def plan_rank(model: ModelSize, ranks: int, available: float, shard: int | None = None) -> MemoryPlan:
    """The memory of rank 0: what belongs to weights is divided among the ranks of a copy, what an update keeps is not.

    `shard` is the number of ranks that share a copy; by default all do. Rank 0 also gathers buckets of weights.
    """
    shards = min(shard or ranks, ranks)
    sharded = [replace(part, size=-(-part.size // shards)) for part in model.parts]
    whole = []
    if shards > 1:
        gathered = GATHERED_LAYERS * HALF_BYTES * model.numbers // max(1, model.layers)
        whole = [
            MemoryPart("gathered layers", gathered, during=("pass",)),
            MemoryPart("weights on their way", min(FLOAT_BYTES * model.numbers, BUCKET_BYTES), during=("publishing",)),
        ]
    return MemoryPlan((*sharded, *whole, *model.passes), int(MAX_FRACTION * available))


def plan_server(model: ModelSize, tp: int, available: float, sequences: float, tokens: float) -> MemoryPlan:
    """The memory of one device of a server that runs this many sequences of this mean length."""
    parts = (
        MemoryPart("weights", model.server_bytes // tp, "raise --servers-tp"),
        MemoryPart("keys and values", int(sequences * tokens * model.kv_bytes / tp), "lower `admission.writing`"),
        MemoryPart("the server's overhead", SERVER_OVERHEAD),
    )
    return MemoryPlan(parts, int(MAX_FRACTION * available))


def cache_room(model: ModelSize, tp: int, device: Device, taken: float = 0.0) -> int:
    """Tokens whose keys and values a server has room for; at most 0 if its weights do not fit."""
    free = MAX_FRACTION * device.memory - taken - SERVER_OVERHEAD - model.server_bytes / tp
    return int(free * tp // model.kv_bytes)

"""How fast an engine server and a trainer are: the few numbers that a simulation needs of either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gateway.errors import ConfigError
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
from trainer.policy.placement import MAX_FRACTION
from trainer.train.settings import TrainSettings

SERVER_OVERHEAD = 2**31
"""Memory of a server besides weights, keys and values. An estimate; SGLang keeps more free on large GPUs."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """An engine server. A decode step gives one token to each running sequence; it takes `fixed_s` plus the running
    sequences' shares (bound by memory bandwidth), but at least `floor_s` for each of them (bound by arithmetic)."""

    fixed_s: float
    """Seconds of a step however many sequences run: reading the weights, and launching."""
    sequence_s: float = 0.0
    """More seconds for each running sequence."""
    context_s: float = 0.0
    """More seconds for each token in the running sequences' contexts, whose keys and values are read."""
    floor_s: float = 0.0
    """The least seconds for each running sequence."""
    prefill_s: float = 0.0
    """Seconds for each token that is read into the cache; decoding waits meanwhile."""
    max_running: int = 1 << 30
    """Sequences that the cache has room for; further ones wait."""

    def step_s(self, running: int, context: float) -> float:
        """Seconds of a decode step."""
        bandwidth_s = self.fixed_s + running * self.sequence_s + context * self.context_s
        return max(bandwidth_s, running * self.floor_s)


@dataclass(frozen=True, slots=True)
class TrainerSpeed:
    """All ranks of a trainer together."""

    token_s: float
    """Seconds of an update for each token of its rows."""
    fixed_s: float = 0.0
    """Seconds of an update however many tokens it has."""
    publish_s: float = 0.0
    """Seconds until all servers have new weights."""

    def update_s(self, tokens: float) -> float:
        """Seconds of an update; without tokens there is none."""
        return self.fixed_s + tokens * self.token_s if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run, as the simulation sees them."""

    servers: int
    engine: EngineSpeed
    trainer: TrainerSpeed
    host_workers: float = 1.0
    """Processes that play rollouts (`rollout.workers`, or the training process): they parse turns, call tools, build
    ledgers."""

    def shrink(self, factor: float) -> Cluster:
        """The cluster with this share of its servers and of its trainer's speed."""
        trainer = replace(self.trainer, token_s=self.trainer.token_s / factor)
        servers, workers = max(1, round(self.servers * factor)), self.host_workers * factor
        return replace(self, servers=servers, trainer=trainer, host_workers=workers)


COMPUTE_EFFICIENCY = 0.35
"""The share of the peak arithmetic that updates and prefill are expected to reach. An assumption, not measured here."""
BANDWIDTH_EFFICIENCY = 0.7
"""The share of the peak memory bandwidth that decoding is expected to reach. An assumption, not measured here."""
NETWORK_BYTES_PER_S = 25e9
"""Between machines, for each device: half of a 400 Gbit/s port. An assumption; it depends on the cluster."""
DEVICES_PER_MACHINE = 8


@dataclass(frozen=True, slots=True)
class Device:
    """One device, with the peak figures of its data sheet."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 operations per second, without sparsity."""
    bandwidth: float
    """Bytes per second from its memory."""
    link: float
    """Bytes per second and direction to devices of the same machine."""
    source: str

    def link_to(self, devices: int) -> float:
        """Bytes per second and direction where this many devices take part."""
        return self.link if devices <= DEVICES_PER_MACHINE else min(self.link, NETWORK_BYTES_PER_S)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40e9, 312e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM 40 GB"),
        Device("a100", 80e9, 312e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM 80 GB"),
        Device("h100", 80e9, 989e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM"),
        Device("h200", 141e9, 989e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM"),
        Device("b200", 180e9, 2250e12, 7.7e12, 900e9, "NVIDIA DGX B200 data sheet, an eighth of the system"),
        Device("l40s", 48e9, 362e12, 864e9, 32e9, "NVIDIA L40S data sheet, PCIe 4"),
        Device("l4", 24e9, 121e12, 300e9, 32e9, "NVIDIA L4 data sheet, PCIe 4"),
        Device("mi300x", 192e9, 1307e12, 5.3e12, 448e9, "AMD Instinct MI300X data sheet"),
    )
}


def find_device(name: str) -> Device:
    """The device of this name. Raises ConfigError with all names."""
    device = DEVICES.get(name.lower())
    if device is None:
        remedy = f"name one of {', '.join(DEVICES)}"
        raise ConfigError(f"{name!r} is no device that is known", field="--device", remedy=remedy)
    return device


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
    passes = plan_update_pass(model, update, max(update.micro_batch_tokens, settings.limits.rollout_tokens))
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
        MemoryPart(
            "keys and values", int(sequences * tokens * model.kv_bytes / tp), "lower `concurrency.running_requests`"
        ),
        MemoryPart("the server's overhead", SERVER_OVERHEAD),
    )
    return MemoryPlan(parts, int(MAX_FRACTION * available))


def cache_room(model: ModelSize, tp: int, device: Device, taken: float = 0.0) -> int:
    """Tokens whose keys and values a server has room for; at most 0 if its weights do not fit."""
    free = MAX_FRACTION * device.memory - taken - SERVER_OVERHEAD - model.server_bytes / tp
    return int(free * tp // model.kv_bytes)

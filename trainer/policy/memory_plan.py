"""Plans a run's memory from the model's shapes before anything is loaded, and how trainer and engine share one GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from trainer.algorithms.settings import AlgorithmSettings
from trainer.engines import can_use_sglang
from trainer.model import auto_class
from trainer.policy.errors import PolicyError
from trainer.policy.optimizers import is_muon_matrix
from trainer.policy.settings import UpdateSettings
from trainer.rollout.settings import BaseRolloutSettings, ServingSettings
from trainer.vision.family import family_from_config

GIB = 1024**3
BUCKET_BYTES = GIB
"""Weights that ranks gather at once for servers."""
FLOAT_BYTES = 4
SMALLER_MODEL = "use a smaller model"
FEWER_SEQUENCES = "lower `admission.writing` or `limits.rollout_tokens`"
USE_LORA = "set `update.lora`"
LOWER_CHUNK = "lower `update.chunk`"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory, with the setting that lowers it."""

    name: str
    size: int
    """Bytes."""
    remedy: str = SMALLER_MODEL
    """What makes it smaller."""
    is_transient: bool = False
    """Whether it exists only during an update."""
    note: str = ""
    """What cannot be known in advance: shown, but not counted."""

    def __str__(self) -> str:
        return f"{self.name} {self.size / GIB:.2f} GiB{self.note}"


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory at its peak."""

    parts: tuple[MemoryPart, ...]
    available: int

    @property
    def needed(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed < self.available

    @property
    def remedy(self) -> str:
        """How to lower the largest parts, the largest first; empty if the plan fits."""
        return "" if self.fits else _join_remedies(self.parts)

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        return f"memory: {parts}; together {self.needed / GIB:.2f} GiB of {self.available / GIB:.2f} GiB that are free"

    def require(self) -> None:
        """Raises PolicyError if the plan does not fit."""
        if not self.fits:
            raise PolicyError(f"this run does not fit: {self}", self.remedy)


def plan_memory(
    settings: BaseRolloutSettings, folder: Path, available: int | None = None, *, shards: int = 1
) -> MemoryPlan:
    """Plans the memory for rollouts, and for training if the settings are those of a training run.

    `shards`: the GPUs that one copy of the training state is split over; the plan is that of rank 0's.
    """
    model = load_meta_model(folder)
    update: UpdateSettings | None = getattr(settings, "update", None)
    algorithm: AlgorithmSettings | None = getattr(settings, "algorithm", None)
    generating, tokens = settings.admission.writing, settings.limits.rollout_tokens
    parts = [
        MemoryPart("weights of the engine", weight_bytes(model)),
        MemoryPart("keys and values", generating * tokens * kv_bytes_per_token(model), FEWER_SEQUENCES),
    ]
    if update and algorithm:
        parts += [replace(part, size=part.size // shards) for part in plan_training(model, update, algorithm)]
        if shards > 1:
            is_embedded = settings.engine == "torch" or (settings.engine == "auto" and not can_use_sglang())
            most = weight_bytes(model) if is_embedded else min(weight_bytes(model), BUCKET_BYTES)
            parts.append(MemoryPart("weights on their way", most, is_transient=True))
        parts += plan_update_pass(model, update, max(update.tokens, tokens))
    return MemoryPlan(tuple(parts), free_memory() if available is None else available)


def load_meta_model(folder: Path) -> Any:
    """The model without its weights, on torch's meta device."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return auto_class(folder).from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"{folder} has no causal language model: {error}", "name a model's folder") from error


def plan_update_pass(model: Any, update: UpdateSettings, tokens: int) -> list[MemoryPart]:
    """The memory of one forward and backward pass."""
    config = model.config.get_text_config(decoder=True)
    heads, kv_heads, head_width = _attention_shape(config)
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    # What the norms, products and activations of a common decoder layer keep per token for the backward pass.
    per_layer = 10 * hidden + 6 * (heads + kv_heads) * head_width + 4 * inner
    layers = config.num_hidden_layers
    kept = per_layer + layers * hidden if update.checkpointing else layers * per_layer
    remedy = "lower `update.tokens`" + ("" if update.checkpointing else " or set `update.checkpointing`")
    vision_bytes, note = vision_bytes_per_token(model, update), ""
    if vision_bytes:
        remedy += " or `update.vision: frozen`"
        note = f" (plus {vision_bytes / 2**20:.2g} MiB in the vision encoder for each image token)"
    return [
        MemoryPart(
            f"a pass over {tokens} tokens",
            FLOAT_BYTES * tokens * kept,
            f"{remedy}; a single rollout is never split",
            True,
            note,
        ),
        MemoryPart(
            f"logits of {update.chunk} tokens",
            4 * FLOAT_BYTES * update.chunk * config.vocab_size,
            LOWER_CHUNK,
            True,
        ),
    ]


def vision_bytes_per_token(model: Any, update: UpdateSettings) -> int:
    """Bytes that a trained vision encoder keeps per image token: inputs and outputs of its linear layers."""
    family = family_from_config(model.config.to_dict())
    if family is None or not update.trains_vision:
        return 0
    encoder, config = model.get_submodule(family.vision_module), model.config.vision_config
    linear = [
        (module.in_features, module.out_features) for module in encoder.modules() if isinstance(module, torch.nn.Linear)
    ]
    kept = sum(map(sum, linear))
    if update.checkpointing:
        kept = kept // config.depth + config.depth * linear[0][0]
    return FLOAT_BYTES * int(config.spatial_merge_size) ** 2 * kept


def plan_training(model: Any, update: UpdateSettings, algorithm: AlgorithmSettings) -> Iterator[MemoryPart]:
    """The memory of weights, gradients and optimizer, and of a reference and a critic if there are some."""
    weights = weight_bytes(model)
    yield MemoryPart("weights", weights)
    if update.lora:
        linear = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        ]
        sides = sum(module.in_features + module.out_features for module in linear)
        yield MemoryPart("adapters", 4 * FLOAT_BYTES * update.lora.rank * sides, "lower `update.lora.rank`")
        yield MemoryPart("merged weights for the engine", weights, is_transient=True)
    else:
        yield MemoryPart("gradients", weights, USE_LORA, True)
        yield MemoryPart("optimizer", FLOAT_BYTES * _optimizer_numbers(model, update), USE_LORA)
        if algorithm.kl.coefficient:
            yield MemoryPart("reference", weights, f"{USE_LORA}, or `algorithm.kl.coefficient: 0`")
    if update.critic:
        yield MemoryPart(
            "critic", 4 * weights, "set `algorithm.credit.kind` to another kind than `gae`, without `update.critic`"
        )


def _optimizer_numbers(model: Any, update: UpdateSettings) -> int:
    """Muon keeps one number per weight, AdamW two."""
    is_muon = update.optimizer == "muon"
    return sum(
        (1 if is_muon and is_muon_matrix(name, value) else 2) * value.numel()
        for name, value in model.named_parameters()
    )


def weight_bytes(model: Any) -> int:
    """Bytes of the weights in float32."""
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    return FLOAT_BYTES * numbers


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of a token's keys and values in float32."""
    config = model.config.get_text_config(decoder=True)
    _, kv_heads, head_width = _attention_shape(config)
    size: int = 2 * FLOAT_BYTES * config.num_hidden_layers * kv_heads * head_width
    return size


def _attention_shape(config: Any) -> tuple[int, int, int]:
    """The numbers of query and key-value heads, and the width of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def free_memory() -> int:
    """Free bytes: of the GPU if there is one, else of the machine, including memory that it can reclaim."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a CPU, only the error's text tells."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def suggest_remedy(model: Any, update: UpdateSettings) -> str:
    """How to lower the memory of a step that ran out of it."""
    return _join_remedies(plan_update_pass(model, update, update.tokens))


def _join_remedies(parts: Any) -> str:
    total = sum(part.size for part in parts)
    largest = sorted(parts, key=lambda part: -part.size)
    return "; ".join(f"{part.remedy} ({part})" for part in largest if part.size * 10 > total)


SERVER_OVERHEAD = 2 * GIB
"""Memory of a server besides weights, keys and values: context, CUDA graphs and activations. An estimate."""
MAX_FRACTION = 0.9
"""The largest share of the memory that a server is given."""
MEMORY_FRACTION_FLAG = "--mem-fraction-static"
MEMORY_SAVER_FLAG = "--enable-memory-saver"


@dataclass(frozen=True, slots=True)
class Placement:
    """How trainer and engine share a GPU: `together` takes turns, `beside` holds both at once."""

    kind: Literal["together", "beside"]
    plan: MemoryPlan
    """What has to fit at the peak."""
    fraction: float | None = None
    """The share of the memory free at the server's start that it may take; None if no server of ours is on the GPU."""

    def __str__(self) -> str:
        if self.fraction is None:
            reason = "no server started by this run shares a GPU with the trainer"
            return f"{self.plan}\nplacement: side by side; {reason}"
        turns = "taking turns, the engine releases its memory during each update"
        how = turns if self.kind == "together" else "side by side"
        return f"{self.plan}\nplacement: {how}; the server may take {self.fraction:.0%} of the GPU memory then free"

    def apply_to(self, serving: ServingSettings) -> ServingSettings:
        """Settings with the server flags of this placement; flags that the operator set win."""
        if self.fraction is None:
            return serving
        options = serving.options
        if MEMORY_FRACTION_FLAG not in options:
            options = (*options, MEMORY_FRACTION_FLAG, f"{self.fraction:.3f}")
        if self.kind == "together" and MEMORY_SAVER_FLAG not in options:
            options = (*options, MEMORY_SAVER_FLAG)
        return serving.model_copy(update={"placement": self.kind, "options": options})


def plan_placement(
    settings: BaseRolloutSettings,
    folder: Path,
    available: int | None = None,
    *,
    shares_gpu: bool | None = None,
    shards: int = 1,
) -> Placement:
    """Plans how a GPU is shared. The plan may not fit.

    `shards` is as in `plan_memory`. `shares_gpu`: whether a server of this run is on the trainer's GPU; by default
    found out on this machine.
    """
    everything = plan_memory(settings, folder, available, shards=shards)
    if not (_shares_gpu_with_server(settings) if shares_gpu is None else shares_gpu):
        return Placement("beside", everything)
    overhead = MemoryPart("the server's overhead", SERVER_OVERHEAD)
    engine, training = [*everything.parts[:2], overhead], everything.parts[2:]
    resident = [part for part in training if not part.is_transient]
    available = everything.available
    beside = MemoryPlan((*engine, *training), available)
    while_generating = MemoryPlan((*engine, *resident), available)
    while_updating = MemoryPlan((overhead, *training), available)
    turns = max(while_generating, while_updating, key=lambda plan: plan.needed)
    requested = settings.serving.placement
    together = requested == "together" or (requested == "auto" and not beside.fits and _is_synchronous(settings))
    plan = turns if together else beside
    loaded = sum(part.size for part in training[:1])
    kept = sum(part.size for part in (resident if together else training)) - loaded + SERVER_OVERHEAD
    fraction = min(MAX_FRACTION, 1 - kept / (available - loaded)) if plan.fits else 0.0
    return Placement("together" if together else "beside", plan, fraction)


def _is_synchronous(settings: BaseRolloutSettings) -> bool:
    """Whether there are times without generation, in which the engine can release its memory."""
    return getattr(settings, "mode", "synchronous") == "synchronous"


def _shares_gpu_with_server(settings: BaseRolloutSettings) -> bool:
    if not torch.cuda.is_available() or settings.serving.replicas > 1:
        return False
    return settings.engine == "sglang" or (settings.engine == "auto" and can_use_sglang())

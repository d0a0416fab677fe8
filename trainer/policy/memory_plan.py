"""Plans a run's memory from the model's shapes before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trainer.algorithms.settings import AlgorithmSettings
from trainer.engine.torch.choose_holding import choose_holding, largest_matrix
from trainer.engine.torch.dense_model import unsupported_reason
from trainer.engine.torch.weights import Holding
from trainer.engines import can_use_sglang
from trainer.model import auto_class
from trainer.policy.errors import PolicyError
from trainer.policy.optimizers import is_muon_matrix
from trainer.policy.settings import UpdateSettings
from trainer.rollout.settings import BaseRolloutSettings
from trainer.vision.family import family_from_config

GIB = 1024**3
BUCKET_BYTES = GIB
"""Weights that ranks gather at once for servers."""
GATHERED_LAYERS = 2
"""Layers whose weights are gathered at once: the one that computes, and the next."""
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
    is_generating: bool = False
    """Whether it exists only while rollouts are generated, by an engine that frees it during an update."""

    def __str__(self) -> str:
        return f"{self.name} {self.size / GIB:.2f} GiB{self.note}"


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory at its peak."""

    parts: tuple[MemoryPart, ...]
    available: int
    taken: int = 0
    """What the process has taken already, with its libraries."""

    @property
    def needed(self) -> int:
        """What is needed at once: parts of an update and of an engine that takes turns with it are not."""
        updating = sum(part.size for part in self.parts if part.is_transient)
        generating = sum(part.size for part in self.parts if part.is_generating)
        return sum(part.size for part in self.parts) - min(updating, generating)

    @property
    def peak(self) -> int:
        """The process's memory at its peak."""
        return self.taken + self.needed

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
    settings: BaseRolloutSettings, folder: Path, available: int | None = None, *, shards: int = 1, ranks: int = 1
) -> MemoryPlan:
    """Plans the memory for rollouts, and for training if the settings are those of a training run.

    `shards`: the GPUs that one copy of the training state is split over; `ranks`: the processes that train. The plan
    is that of rank 0's.
    """
    model = load_meta_model(folder)
    update: UpdateSettings | None = getattr(settings, "update", None)
    algorithm: AlgorithmSettings | None = getattr(settings, "algorithm", None)
    generating, tokens = settings.admission.writing, settings.limits.rollout_tokens
    holding, kv_bytes = _embedded_holding(settings, model, ranks), generating * tokens * kv_bytes_per_token(model)
    parts = [
        _engine_weights(model, holding),
        MemoryPart("keys and values", kv_bytes, FEWER_SEQUENCES, is_generating=holding == "shared"),
    ]
    if update and algorithm:
        is_offloaded = getattr(getattr(settings, "distributed", None), "offload", False)
        state, passes = _plan_rank(model, update, algorithm, shards, tokens, is_offloaded=is_offloaded)
        parts += state
        if shards > 1:
            most = weight_bytes(model) if is_embedded(settings) else min(weight_bytes(model), BUCKET_BYTES)
            parts.append(MemoryPart("weights on their way", most, is_transient=True))
        parts += passes
    taken = 0 if torch.cuda.is_available() else resident_memory()
    return MemoryPlan(tuple(parts), free_memory() if available is None else available, taken)


def plan_other_rank(
    folder: Path,
    update: UpdateSettings,
    algorithm: AlgorithmSettings,
    shards: int,
    tokens: int,
    *,
    is_offloaded: bool = False,
) -> tuple[MemoryPart, ...]:
    """The memory of a rank without an engine: `shards` ranks share a copy of the training state, and a row has up to
    `tokens`."""
    model = load_meta_model(folder)
    state, passes = _plan_rank(model, update, algorithm, shards, tokens, is_offloaded=is_offloaded)
    return (*state, *passes)


def _plan_rank(
    model: Any, update: UpdateSettings, algorithm: AlgorithmSettings, shards: int, tokens: int, *, is_offloaded: bool
) -> tuple[list[MemoryPart], list[MemoryPart]]:
    """A rank's share of the training state, and its passes over rows."""
    longest = max(update.tokens, tokens)
    state = [replace(part, size=part.size // shards) for part in plan_training(model, update, algorithm)]
    if is_offloaded and torch.cuda.is_available():
        state = list(_offloaded(state, model))
    return state, plan_update_pass(model, update.model_copy(update={"chunk": min(update.chunk, longest)}), longest)


def _embedded_holding(settings: BaseRolloutSettings, model: Any, ranks: int) -> Holding:
    """How an engine in this process will hold the weights; as copies, where servers have them."""
    if not is_embedded(settings) or unsupported_reason(model):
        return "copied"
    update: UpdateSettings | None = getattr(settings, "update", None)
    can_share = update is not None and not update.lora and ranks == 1 and is_synchronous(settings)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = weight_bytes(model) // FLOAT_BYTES
    return choose_holding(settings.engine_dtype, parameters, largest_matrix(model), device=device, can_share=can_share)


def _engine_weights(model: Any, holding: Holding) -> MemoryPart:
    if holding == "shared":
        return MemoryPart("weights of the engine", 0, note=" (shared with the trainer)")
    share = 2 if holding == "bfloat16" else 1
    return MemoryPart("weights of the engine", weight_bytes(model) // share)


def is_embedded(settings: BaseRolloutSettings) -> bool:
    """Whether the engine runs in this process."""
    return settings.engine == "torch" or (settings.engine == "auto" and not can_use_sglang())


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


def _offloaded(training: Sequence[MemoryPart], model: Any) -> Iterator[MemoryPart]:
    """What a GPU has of a training whose weights are in the host's memory: those that a pass is about to use."""
    host = sum(part.size for part in training)
    yield MemoryPart("weights", 0, note=f" (training takes {host / GIB:.2f} GiB of the host's memory)")
    numbers = {name: value.numel() for name, value in model.named_parameters()}
    around = sum(size for name, size in numbers.items() if ".layers." not in name)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    layer = (sum(numbers.values()) - around) // layers
    yield MemoryPart("gathered layers", FLOAT_BYTES * (around + GATHERED_LAYERS * layer), is_transient=True)


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


def resident_memory() -> int:
    """Bytes that this process has in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


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


def is_synchronous(settings: BaseRolloutSettings) -> bool:
    """Whether there are times without generation, in which the engine can release its memory."""
    return getattr(settings, "mode", "synchronous") == "synchronous"

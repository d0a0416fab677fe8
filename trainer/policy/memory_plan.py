"""Plans a run's memory from the model's shapes before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.algorithms.settings import AlgorithmSettings
from trainer.engine.base import FEWER_SEQUENCES
from trainer.engines import can_use_sglang
from trainer.policy.master_weights import compute_dtype
from trainer.policy.memory_parts import (
    GIB,
    LOADED,
    UPDATE,
    MemoryPart,
    MemoryPlan,
    Phase,
    count_adapter_parameters,
    find_adapted_layers,
    is_expert_stack,
    join_remedies,
    load_meta_model,
)
from trainer.policy.process_memory import measure_floor
from trainer.policy.settings import UpdateSettings
from trainer.rollout.settings import BaseRolloutSettings
from trainer.vision.family import family_from_config

if TYPE_CHECKING:
    from trainer.engine.torch.weights import Holding

BUCKET_BYTES = GIB
"""Weights that are gathered, or rounded and copied, at once for servers."""
EXCHANGES = 4
"""Copies of a token's states for each of its experts, where ranks shard these: sent and received, both ways."""
GATHERED_LAYERS = 2
"""Layers whose weights are gathered at once: the one that computes, and the next."""
FLOAT_BYTES = 4
HEAP_BYTES = 2**25
"""The largest threshold from which glibc gives freed memory back to the system."""
HEAP_SLACK = 1.75
"""The freed memory that the heap keeps, as a multiple of a layer's activations: measured with 4,096 tokens of a small
model, with and without checkpointing and adapters, beside the same passes with a threshold of 1 MiB."""
LOGITS_COPIES = 3
"""Copies of a chunk's logits in a pass: before and after the exponential, and one in the model's dtype."""
TIED_GRADIENTS = 3
"""Gradients of an embedding that is the head, too, at the end of a backward pass: one of each use, and their sum, which
is then added to that of earlier passes."""
SAMPLING_COPIES = 7
"""Copies of a row of logits, in numbers of float32, while the embedded engine samples from it."""
FILTER_COPIES = 12
"""The same where `top_p` or `top_k` sort the row, in addition."""
USE_CHECKPOINTING = "set `update.gradient_checkpointing`"
USE_LORA = "set `update.lora`"
LOWER_CHUNK = "lower `update.logits_chunk`"


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
    generating, tokens = settings.concurrency.running_requests, settings.limits.rollout_tokens
    holding, positions = _embedded_holding(settings, model, ranks), tokens
    server_bytes = _server_bytes(settings)
    if is_embedded(settings):
        from trainer.engine.torch.dense_model import unsupported_reason
        from trainer.engine.torch.kv_cache import KVCache
        from trainer.engine.torch.paged_kv_cache import planned_positions

        if not unsupported_reason(model):
            is_ahead = _decodes_ahead(settings, model, holding)
            positions = (planned_positions if is_ahead else KVCache.planned_length)(tokens)
        server_bytes = _embedded_bytes(holding)
    kv_bytes = generating * positions * kv_bytes_per_token(model) * server_bytes // FLOAT_BYTES
    parts = [
        _engine_weights(model, holding, server_bytes),
        MemoryPart("keys and values", kv_bytes, FEWER_SEQUENCES, during=_cache_phases(holding)),
    ]
    if update and algorithm:
        distributed: Any = getattr(settings, "distributed", None)
        state, passes = _plan_rank(model, update, algorithm, shards, tokens, distributed)
        parts += state
        if shards > 1 or not is_embedded(settings):
            most = weight_bytes(model) if is_embedded(settings) else min(weight_bytes(model), BUCKET_BYTES)
            parts.append(MemoryPart("weights on their way", most, during=("publishing",)))
        parts += passes
        if not torch.cuda.is_available():
            shared_by = getattr(distributed, "context_parallel", 1)
            parts.append(plan_allocator(model, update, max(update.pass_tokens, tokens) // shared_by))
    if is_embedded(settings):
        parts += _plan_embedded(settings, model, holding)
    taken = 0 if torch.cuda.is_available() else measure_floor(lora=bool(update and update.lora))
    return MemoryPlan(tuple(parts), free_memory() if available is None else available, taken)


def plan_other_rank(
    folder: Path, update: UpdateSettings, algorithm: AlgorithmSettings, shards: int, tokens: int, distributed: Any
) -> tuple[MemoryPart, ...]:
    """The memory of a rank without an engine: `shards` ranks share a copy of the training state, and a row has up to
    `tokens`. `distributed` are the settings of ranks."""
    model = load_meta_model(folder)
    state, passes = _plan_rank(model, update, algorithm, shards, tokens, distributed)
    return (*state, *passes)


def _plan_rank(
    model: Any, update: UpdateSettings, algorithm: AlgorithmSettings, shards: int, tokens: int, distributed: Any
) -> tuple[list[MemoryPart], list[MemoryPart]]:
    """A rank's share of the training state, and its passes over rows."""
    longest, shared_by = max(update.pass_tokens, tokens), getattr(distributed, "context_parallel", 1)
    state = [replace(part, size=part.size // shards) for part in plan_training(model, update, algorithm, shards)]
    if getattr(distributed, "offload", False) and torch.cuda.is_available():
        state = list(_offloaded(state, model, computed_bytes(update)))
    chunk = min(update.logits_chunk, -(-longest // shared_by))
    passes = plan_update_pass(model, update.model_copy(update={"logits_chunk": chunk}), tokens, shared_by)
    if getattr(distributed, "expert_parallel", False):
        passes += _plan_sharded_experts(model, update, shards, -(-longest // shared_by))
    return state, [*passes, *plan_embedding_gradients(model, update)]


def _plan_sharded_experts(model: Any, update: UpdateSettings, shards: int, tokens: int) -> Iterator[MemoryPart]:
    """What a pass keeps of this rank's experts in the dtype that it computes in, and of the tokens that ranks exchange;
    with checkpointing, of a layer's."""
    experts = [sum(map(torch.numel, module.parameters())) for module in model.modules() if is_expert_stack(module)]
    kept = experts[:1] if update.gradient_checkpointing else experts
    config, width, remedy = model.config.get_text_config(decoder=True), computed_bytes(update), USE_CHECKPOINTING
    rounded = width * sum(kept) // shards if width < FLOAT_BYTES else 0
    yield MemoryPart("rounded experts", rounded, remedy, ("pass",))
    sent = EXCHANGES * width * tokens * getattr(config, "num_experts_per_tok", 1) * config.hidden_size * len(kept)
    yield MemoryPart("tokens sent to experts", sent, remedy, ("pass",), " (if all experts get equally many)")


def _cache_phases(holding: Holding) -> tuple[Phase, ...]:
    """When the engine's caches are in memory: it frees them for updates if it shares the trainer's weights."""
    return ("generating",) if holding == "shared" else LOADED


def _plan_embedded(settings: BaseRolloutSettings, model: Any, holding: Holding) -> Iterator[MemoryPart]:
    """What an engine in this process needs besides its weights, and its keys and values of running sequences."""
    from trainer.engine.torch.torch_engine import default_cache_bytes

    rollouts, tokens = settings.concurrency.running_requests, settings.limits.rollout_tokens
    step = getattr(settings, "prompts", rollouts) * getattr(settings, "n", 1)
    width = _embedded_bytes(holding)
    most = default_cache_bytes("cuda" if torch.cuda.is_available() else "cpu")
    cached = min(most, step * tokens * kv_bytes_per_token(model) * width // FLOAT_BYTES)
    yield MemoryPart("prefixes that are kept", cached, FEWER_SEQUENCES, during=_cache_phases(holding))
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    is_ahead, copies = _decodes_ahead(settings, model, holding), SAMPLING_COPIES
    if is_ahead and (settings.sampling.top_p < 1 or settings.sampling.top_k):
        copies += FILTER_COPIES
    sampling = copies * FLOAT_BYTES * rollouts * vocabulary
    # CUDA graphs keep the memory that they use.
    phases: tuple[Phase, ...] = ("generating",) if is_synchronous(settings) and not is_ahead else LOADED
    yield MemoryPart("probabilities while sampling", sampling, "lower `concurrency.running_requests`", during=phases)
    if holding != "shared":
        yield MemoryPart("the model that the engine copies", weight_bytes(model, width), during=("loading",))


def _decodes_ahead(settings: BaseRolloutSettings, model: Any, holding: Holding) -> bool:
    """Whether an engine in this process takes pages and makes CUDA graphs."""
    from trainer.engine.torch.choose_holding import can_decode_ahead
    from trainer.engine.torch.dense_model import unsupported_reason

    can = can_decode_ahead(holding, deterministic=bool(settings.deterministic))
    return can and torch.cuda.is_available() and not unsupported_reason(model)


def _embedded_bytes(holding: Holding) -> int:
    """Bytes of a number in keys and values, and in the model that is loaded for the engine."""
    return 2 if holding == "bfloat16" and torch.cuda.is_available() else FLOAT_BYTES


def _embedded_holding(settings: BaseRolloutSettings, model: Any, ranks: int) -> Holding:
    """How an engine in this process will hold the weights; as copies, where servers have them."""
    if not is_embedded(settings):
        return "copied"
    from trainer.engine.torch.choose_holding import choose_holding, is_half, largest_matrix
    from trainer.engine.torch.dense_model import unsupported_reason

    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision, parameters = settings.engine_precision, weight_bytes(model) // FLOAT_BYTES
    update: UpdateSettings | None = getattr(settings, "update", None)
    if is_half(precision, device, update.dtype if update else "auto"):
        return "bfloat16"
    if unsupported_reason(model):
        return "copied"
    can_share = update is not None and not update.lora and ranks == 1 and is_synchronous(settings)
    can_share = can_share and computed_bytes(update) == FLOAT_BYTES
    return choose_holding(precision, parameters, largest_matrix(model), device=device, can_share=can_share)


def _engine_weights(model: Any, holding: Holding, server_bytes: int) -> MemoryPart:
    if holding == "shared":
        return MemoryPart("weights of the engine", 0, note=" (shared with the trainer)")
    width = 2 if holding == "bfloat16" else server_bytes
    return MemoryPart("weights of the engine", weight_bytes(model, width))


def _server_bytes(settings: BaseRolloutSettings) -> int:
    """Bytes of a number in servers: on a GPU they compute in a 16-bit type, unless they are told otherwise."""
    from trainer.engine.sglang.launch import on_cpu

    options = " ".join(settings.serving.options).replace("=", " ")
    return FLOAT_BYTES if on_cpu(settings.serving.options) or "--dtype float32" in options else 2


def computed_bytes(update: UpdateSettings | None) -> int:
    """Bytes of a number that a pass of the trainer's model computes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return compute_dtype(update, device).itemsize if update else FLOAT_BYTES


def is_embedded(settings: BaseRolloutSettings) -> bool:
    """Whether the engine runs in this process."""
    return settings.engine == "torch" or (settings.engine == "auto" and not can_use_sglang())


def plan_update_pass(model: Any, update: UpdateSettings, longest: int, shared_by: int = 1) -> list[MemoryPart]:
    """The memory of one forward and backward pass, where rollouts have up to `longest` tokens, on each of the ranks
    that share it."""
    tokens = max(update.pass_tokens, longest)
    config = model.config.get_text_config(decoder=True)
    heads, kv_heads, head_width = _attention_shape(config)
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    # What the norms, products and activations of a common decoder layer keep per token for the backward pass.
    attention, feed_forward = 10 * hidden + 6 * (heads + kv_heads) * head_width, 4 * inner
    layers = config.num_hidden_layers
    kept = {
        False: layers * (attention + feed_forward),
        "feed_forward": layers * attention + feed_forward,
        True: layers * hidden + attention + feed_forward,
    }[update.gradient_checkpointing]
    remedy = "lower " + ("`limits.rollout_tokens`" if tokens == longest else "`update.micro_batch_tokens`")
    if update.gradient_checkpointing is not True:
        less = "`true`" if update.gradient_checkpointing else "`feed_forward` or `true`"
        remedy += f" or set `update.gradient_checkpointing` to {less}"
    vision_bytes, note = vision_bytes_per_token(model, update), ""
    if vision_bytes:
        remedy += " or `update.freeze_vision: true`"
        note = f" (plus {vision_bytes / 2**20:.2g} MiB in the vision encoder for each image token)"
    width = computed_bytes(update)
    logits = FLOAT_BYTES * update.logits_chunk * config.vocab_size
    # A backward pass has the gradient of the head, too, which it keeps.
    gradients = 0 if update.lora else width * config.hidden_size * config.vocab_size
    return [
        MemoryPart(
            f"a pass over {tokens} tokens",
            width * -(-tokens // shared_by) * kept,
            f"{remedy}; only `distributed.context_parallel` splits a rollout",
            ("pass",),
            note,
        ),
        MemoryPart(
            f"logits of {update.logits_chunk} tokens", LOGITS_COPIES * logits + gradients, LOWER_CHUNK, ("pass",)
        ),
    ]


def plan_embedding_gradients(model: Any, update: UpdateSettings) -> Iterator[MemoryPart]:
    """What the end of a backward pass, which has no activations any more, needs for the embedding's gradient."""
    if update.lora:
        return
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    size = computed_bytes(update) * embedding.numel() * (TIED_GRADIENTS if embedding is head else 1)
    yield MemoryPart("copies of the embedding's gradient", size, USE_LORA, ("end of a pass",))


def plan_allocator(model: Any, update: UpdateSettings, tokens: int) -> MemoryPart:
    """What the C library keeps of freed tensors of a layer and of a chunk's logits, since its heap is too fragmented to
    use them again.

    Tensors that are larger than its largest threshold are given back to the system at once.
    """
    config = model.config.get_text_config(decoder=True)
    heads, kv_heads, head_width = _attention_shape(config)
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    # How many tensors of each width a layer has; adapters add three to the output of each linear layer.
    counts = [(config.hidden_size, 10), (heads * head_width, 6), (kv_heads * head_width, 6), (inner, 4)]
    if update.lora:
        counts += [(config.hidden_size, 6), (heads * head_width, 3), (kv_heads * head_width, 6), (inner, 6)]
    sizes = [(FLOAT_BYTES * tokens * width, count) for width, count in counts]
    sizes.append((FLOAT_BYTES * min(update.logits_chunk, tokens) * config.vocab_size, LOGITS_COPIES))
    size = int(HEAP_SLACK * sum(size * count for size, count in sizes if size < HEAP_BYTES))
    return MemoryPart("what the allocator keeps of freed memory", size, remedy="", during=("pass", "end of a pass"))


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
    if update.gradient_checkpointing is True:
        kept = kept // config.depth + config.depth * linear[0][0]
    return computed_bytes(update) * int(config.spatial_merge_size) ** 2 * kept


def plan_training(
    model: Any, update: UpdateSettings, algorithm: AlgorithmSettings, shards: int = 1
) -> Iterator[MemoryPart]:
    """The memory of weights, gradients and optimizer, and of a reference and a critic if there are some.

    A model that computes in bfloat16 has float32 masters of what is trained; ranks have all in float32, and round what
    they gather.
    """
    weights, width = weight_bytes(model), computed_bytes(update) if shards == 1 else FLOAT_BYTES
    rounded = 0 if width == FLOAT_BYTES else weight_bytes(model, width)
    if update.lora:
        yield MemoryPart("weights", rounded or weights)
        adapters = (4 * FLOAT_BYTES + (width if rounded else 0)) * count_adapter_parameters(model, update)
        yield MemoryPart("adapters", adapters, "lower `update.lora.rank`")
        merged = width * sum(layer.weight.numel() for layer in find_adapted_layers(model, update))
        yield MemoryPart("merged weights for the engine", merged, during=("publishing",))
    else:
        yield MemoryPart("weights", weights + rounded)
        yield MemoryPart("gradients", weights, USE_LORA, UPDATE)
        yield MemoryPart("optimizer", 2 * weights, USE_LORA, LOADED)
        if algorithm.kl.coefficient and not algorithm.kl.reference:
            yield MemoryPart("reference", rounded or weights, f"{USE_LORA}, or `algorithm.kl.coefficient: 0`")
    if algorithm.kl.coefficient and (reference := algorithm.kl.reference) and reference.model:
        teacher = weight_bytes(load_meta_model(Path(reference.model)), width)
        yield MemoryPart("teacher", teacher, "serve it, and name the server (`algorithm.kl.reference.url`)")
    if update.critic:
        yield MemoryPart(
            "critic",
            4 * weights + rounded,
            "set `algorithm.credit.kind` to another kind than `gae`, without `update.critic`",
        )


def _offloaded(training: Sequence[MemoryPart], model: Any, width: int) -> Iterator[MemoryPart]:
    """What a GPU has of a training whose weights are in the host's memory: those that a pass is about to use."""
    host = sum(part.size for part in training)
    yield MemoryPart("weights", 0, note=f" (training takes {host / GIB:.2f} GiB of the host's memory)")
    numbers = {name: value.numel() for name, value in model.named_parameters()}
    around = sum(size for name, size in numbers.items() if ".layers." not in name)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    layer = (sum(numbers.values()) - around) // layers
    yield MemoryPart("gathered layers", width * (around + GATHERED_LAYERS * layer), during=("pass",))


def weight_bytes(model: Any, width: int = FLOAT_BYTES) -> int:
    """Bytes of the weights, by default in float32."""
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    return width * numbers


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


def total_memory() -> int:
    """The bytes of the GPU if there is one, else of the machine."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. On a CPU, only the error's text tells."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def suggest_remedy(model: Any, update: UpdateSettings, longest: int) -> str:
    """How to lower the memory of a step that ran out of it, whose rollouts have up to `longest` tokens."""
    return join_remedies(plan_update_pass(model, update, longest))


def is_synchronous(settings: BaseRolloutSettings) -> bool:
    """Whether there are times without generation, in which the engine can release its memory."""
    return getattr(settings, "mode", "synchronous") == "synchronous"

"""The embedded engine's model for Llama, Qwen2, Qwen3 and Qwen-VL: their layers, computed for continuous batching.

If `deterministic`, the same ids give the same bits whatever else is in the batch: every product has a fixed shape (a
tile of rows in the layers, a query against a page in attention), so the size of the batch changes only the number of
products. This holds for float32 on a CPU with one or two threads. With more threads, torch may round an activation
differently at the border of two threads' shares, by about 1e-6 in a logprob; on a GPU it is untested.

Otherwise each product takes the whole batch, and attention all positions at once, which is up to twice as fast for a
model of 135 million parameters; rounding then depends on the batch, by less than 1e-4 in a logprob.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trainer.engine.torch.kv_cache import Chunk, KVCache, KVShape
from trainer.engine.torch.paged_attention import AttentionPlan
from trainer.engine.torch.weights import FusedWeights, Holding, check_weights
from trainer.vision.family import FAMILIES, ImageFeatures, VisionFamily
from trainer.vision.image_processor import PreparedImage

if TYPE_CHECKING:
    from trainer.engine.torch.decode_ahead import DecodePlan

    Plan: TypeAlias = AttentionPlan | DecodePlan

TILE = 16
"""Rows in one product."""
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""RoPE types whose angles do not depend on the length of the sequence."""
FEATURE_CACHE_BYTES = 2**28
"""Size of the cache of image features."""

BFLOAT16_NOTE = (
    "computes products in bfloat16 (`engine_dtype`): its logprobs differ from the trainer's, which the loss corrects as"
    " `algorithm.mismatch` says"
)
Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines for rotary embeddings."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this model cannot run here, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    model_type = model.config.model_type
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if model_type not in {"llama", "qwen2", "qwen3", *FAMILIES}:
        return f"its type is {model_type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if rope not in STATIC_ROPE:
        return f"its rope is {rope}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "some of its layers do not have full attention"
    return None


class DenseModel:
    """A text model's weights, copied or shared with the trainer, and the computation of its layers.

    With `bfloat16`, matrices and their products are in bfloat16, and nothing is deterministic; everything else is
    computed as without.
    """

    def __init__(self, model: PreTrainedModel, holding: Holding = "copied", *, deterministic: bool = True) -> None:
        config, state = model.config.get_text_config(decoder=True), model.state_dict()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, size, model.dtype, model.device)
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self._epsilon: float = config.rms_norm_eps
        text_model: Any = getattr(model.model, "language_model", model.model)
        self._rotary = copy.deepcopy(text_model.rotary_emb)
        self._rotation_table: Rotation = (torch.empty(0), torch.empty(0))
        self._weights = FusedWeights(_fused_names(model, config, state), state, holding)
        self._layers = self._make_layers()
        self._tile = TILE if deterministic and holding != "bfloat16" else 1
        self.is_exact = self.shape.dtype is torch.float32 and holding != "bfloat16"
        self.notes: tuple[str, ...] = (BFLOAT16_NOTE,) if holding == "bfloat16" else ()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.load(weights)
        self._layers = self._make_layers()

    def _make_layers(self) -> list[_Layer]:
        return [_Layer(self._weights, index) for index in range(self.shape.layers)]

    def __call__(self, chunks: Sequence[Chunk], kv_cache: KVCache) -> Tensor:
        plan = AttentionPlan(chunks, self.shape, kv_cache, self._tile)
        padding = -plan.count % self._tile
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids] + [0] * padding, device=self.shape.device)
        rotation = self._look_up_rotation(max(chunk.end for chunk in chunks), F.pad(plan.positions, (0, padding)))
        return self._run_layers(self._embed(ids), rotation, plan, kv_cache)

    def decode(self, ids: Tensor, rotation: Rotation, plan: Plan, kv_cache: KVCache) -> Tensor:
        """The logits after one more id of each row. All of it is work for the device, which a CUDA graph can replay."""
        return self._run_layers(self._embed(ids), rotation, plan, kv_cache)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weights["embed"]).to(self.shape.dtype)

    def _run_layers(
        self, x: Tensor, rotation: Rotation, plan: Plan, kv_cache: KVCache, deepstack: Sequence[Tensor] = ()
    ) -> Tensor:
        """The logits that the plan wants; `deepstack` tensors are added after the first layers."""
        for index, layer in enumerate(self._layers):
            x = self._attention(x, layer, rotation, (plan, kv_cache.values[index]))
            x = self._mlp(x, layer)
            if index < len(deepstack):
                x = x + deepstack[index]
        hidden = self._norm(x[plan.last], self._weights["norm"])
        return self._linear(hidden, (self._head,))[: plan.rows]

    @property
    def _head(self) -> Tensor:
        head = self._weights.get("head")
        return self._weights["embed"] if head is None else head

    def _attention(self, x: Tensor, layer: _Layer, rotation: Rotation, plan_and_cache: tuple[Plan, Tensor]) -> Tensor:
        plan, kv_layer = plan_and_cache
        heads, size = self.shape.heads, self.shape.head_dim
        qkv = self._linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).view(len(x), -1, size)
        rotated, values = qkv[:, :-heads], qkv[:, -heads:]
        if layer.head_norms is not None:
            rotated = self._norm(rotated, layer.head_norms.view(-1, size))
        rotated = (rotated * rotation[0]).add_(rotated.roll(size // 2, -1).mul_(rotation[1]))
        slots, positions = plan.places
        kv_layer[0, slots, :, positions] = rotated[: plan.count, -heads:]
        kv_layer[1, slots, :, positions] = values[: plan.count]
        output = plan.attend(rotated[: plan.count, :-heads], kv_layer)
        return self._linear(F.pad(output, (0, 0, 0, len(x) - plan.count)), layer.out, layer.out_bias, x)

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = self._linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return self._linear(F.silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias, x)

    def _linear(
        self, x: Tensor, matrices: tuple[Tensor, ...], bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """A linear layer, in tiles of a fixed shape or in one product, added to `residual` if given."""
        if len(matrices) > 1:
            result = torch.cat([self._linear(x, (matrix,)) for matrix in matrices], dim=-1)
        elif self._tile == 1 and residual is not None and matrices[0].dtype is x.dtype:
            result, residual = torch.addmm(residual, x, matrices[0].t()), None
        elif self._tile == 1:
            result = F.linear(x.to(matrices[0].dtype), matrices[0]).to(x.dtype)
        else:
            left = x.view(-1, self._tile, x.shape[-1])
            right = matrices[0].t().expand(len(left), -1, -1)
            if residual is None:
                result = torch.bmm(left, right).view(len(x), -1)
            else:
                result = torch.baddbmm(residual.view(*left.shape[:2], -1), left, right).view(len(x), -1)
                residual = None
        result = result if residual is None else residual + result
        return result if bias is None else result + bias

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self._epsilon)
        return (x_float * scale).to(x.dtype).mul_(weight)

    def _look_up_rotation(self, length: int, positions: Tensor) -> Rotation:
        """The rotation at text positions, from a table that grows with the longest sequence."""
        if length > len(self._rotation_table[0]):
            self._rotation_table = self.rotation_table(2 * length)
        return self._rotation_table[0][positions][:, None], self._rotation_table[1][positions][:, None]

    def rotation_table(self, length: int) -> Rotation:
        """The rotation at the first text positions."""
        return self._compute_rotation(torch.arange(length, device=self.shape.device)[None])

    def _compute_rotation(self, positions: Tensor) -> Rotation:
        cos, sin = self._rotary(torch.empty(0, dtype=self.shape.dtype, device=self.shape.device), positions)
        half = self.shape.head_dim // 2
        return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)


class _Layer:
    """The weights of one layer."""

    def __init__(self, weights: FusedWeights, index: int) -> None:
        def find(name: str) -> Tensor | None:
            return weights.get(f"{index}.{name}")

        def get(name: str) -> Tensor:
            return weights[f"{index}.{name}"]

        self.norm, self.mlp_norm, self.head_norms = get("norm"), get("mlp_norm"), find("head_norms")

        def matrices(name: str) -> tuple[Tensor, ...]:
            return weights.matrices(f"{index}.{name}.weight")

        self.qkv, self.qkv_bias = matrices("qkv"), find("qkv.bias")
        self.out, self.out_bias = matrices("out"), find("out.bias")
        self.gate_up, self.gate_up_bias = matrices("gate_up"), find("gate_up.bias")
        self.down, self.down_bias = matrices("down"), find("down.bias")


def _fused_names(model: PreTrainedModel, config: object, state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """The engine's tensor names, each with the model's tensors that are concatenated."""
    prefix = "model.language_model." if hasattr(model.model, "language_model") else "model."
    fused: dict[str, tuple[str, ...]] = {"embed": (prefix + "embed_tokens.weight",), "norm": (prefix + "norm.weight",)}
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:  # type: ignore[no-untyped-call]
        fused["head"] = ("lm_head.weight",)
    heads = (getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0))
    for index in range(getattr(config, "num_hidden_layers", 0)):
        layer = f"{prefix}layers.{index}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        fused[f"{index}.norm"] = (layer + "input_layernorm.weight",)
        fused[f"{index}.mlp_norm"] = (layer + "post_attention_layernorm.weight",)
        if attention + "q_norm.weight" in state:
            norms = (attention + "q_norm.weight",) * heads[0] + (attention + "k_norm.weight",) * heads[1]
            fused[f"{index}.head_norms"] = norms
        products = {
            "qkv": (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            "out": (attention + "o_proj",),
            "gate_up": (mlp + "gate_proj", mlp + "up_proj"),
            "down": (mlp + "down_proj",),
        }
        for name, parts in products.items():
            for kind in ("weight", "bias"):
                if f"{parts[0]}.{kind}" in state:
                    fused[f"{index}.{name}.{kind}"] = tuple(f"{part}.{kind}" for part in parts)
    return fused


class DenseVisionModel(DenseModel):
    """A dense model with its vision encoder. Images are encoded one by one, so the batch does not affect features."""

    def __init__(
        self, model: PreTrainedModel, family: VisionFamily, holding: Holding = "copied", *, deterministic: bool = True
    ) -> None:
        super().__init__(model, holding, deterministic=deterministic)
        self._family = family
        self._encoder = copy.deepcopy(model.get_submodule(family.vision_module)).train(False)
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        """By the image's digest, for the current weights; least recently used first."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        prefix = f"{self._family.vision_module}."
        state = {prefix + name: value for name, value in self._encoder.state_dict().items()}
        check_weights(weights, {name: value.shape for name, value in state.items()}, weights)
        super().load_weights(weights)
        self._encoder.load_state_dict({name.removeprefix(prefix): weights[name] for name in state})
        self._features.clear()

    def __call__(self, chunks: Sequence[Chunk], kv_cache: KVCache) -> Tensor:
        if not any(chunk.prepared for chunk in chunks):
            return super().__call__(chunks, kv_cache)
        plan = AttentionPlan(chunks, self.shape, kv_cache, self._tile)
        padding = -plan.count % self._tile
        ids = [max(token, 0) for chunk in chunks for token in chunk.ids] + [0] * padding
        x = self._embed(torch.tensor(ids, device=self.shape.device))
        deepstack = self._insert_features(chunks, x)
        return self._run_layers(x, self._rotate_chunks(chunks, padding), plan, kv_cache, deepstack)

    def _insert_features(self, chunks: Sequence[Chunk], x: Tensor) -> list[Tensor]:
        """Writes image features over the placeholders' embeddings in `x`; returns the deepstack tensors."""
        deepstack: list[Tensor] = []
        for start, image, rows in _images_in(chunks):
            features = self._encode(image)
            span = slice(start, start + rows.stop - rows.start)
            x[span] = features.features_FD[rows]
            deepstack = deepstack or [torch.zeros_like(x) for _ in features.deepstack]
            for target, layer_features_FD in zip(deepstack, features.deepstack, strict=True):
                target[span] = layer_features_FD[rows]
        return deepstack

    def _compute_rotation(self, positions: Tensor) -> Rotation:
        """Text has the same position on each axis of an image, which transformers 5.17 wants to be told."""
        return super()._compute_rotation(positions.expand(3, *positions.shape) if positions.dim() == 2 else positions)

    def _rotate_chunks(self, chunks: Sequence[Chunk], padding: int) -> Rotation:
        positions = torch.cat([*map(_positions_3N, chunks), torch.zeros(3, padding, dtype=torch.long)], dim=1)
        positions = positions.to(self.shape.device)
        if all(chunk.prepared is None or chunk.start >= len(chunk.prepared.ids) for chunk in chunks):  # while decoding
            return self._look_up_rotation(max(chunk.end for chunk in chunks), positions[0])
        cos, sin = self._compute_rotation(positions[:, None])
        return cos[:, None], sin[:, None]

    def _encode(self, image: PreparedImage) -> ImageFeatures:
        if image.digest not in self._features:
            device = self.shape.device
            pixels = image.pixels.to(device, self.shape.dtype)
            self._features[image.digest] = self._family.encode(self._encoder, pixels, torch.tensor([image.grid]))
        self._features.move_to_end(image.digest)
        while len(self._features) > 1 and sum(map(_nbytes, self._features.values())) > FEATURE_CACHE_BYTES:
            self._features.popitem(last=False)
        return self._features[image.digest]


def _images_in(chunks: Sequence[Chunk]) -> Iterator[tuple[int, PreparedImage, slice]]:
    """The images in the chunks: the first index among the step's tokens, the image, and its rows in the chunk."""
    offset = 0
    for chunk in chunks:
        for start, image in chunk.prepared.images if chunk.prepared else ():
            rows = slice(max(0, chunk.start - start), min(image.token_count, chunk.end - start))
            if rows.start < rows.stop:
                yield offset + start + rows.start - chunk.start, image, rows
        offset += len(chunk.ids)


def _positions_3N(chunk: Chunk) -> Tensor:
    if chunk.prepared is None:
        return torch.arange(chunk.start, chunk.end).expand(3, -1)
    prompt_length = len(chunk.prepared.ids)
    prompt = chunk.prepared.positions_3N[:, chunk.start : min(chunk.end, prompt_length)]
    sampled = torch.arange(max(chunk.start, prompt_length), max(chunk.end, prompt_length))
    return torch.cat([prompt, (sampled + chunk.prepared.position_offset).expand(3, -1)], dim=1)


def _nbytes(features: ImageFeatures) -> int:
    return features.features_FD.nbytes + sum(layer_FD.nbytes for layer_FD in features.deepstack)

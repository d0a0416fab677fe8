"""Llama, Qwen2 and Qwen3 are one model with small differences, and a step of it need not cost what a general one does.

The same ids give the same bits whatever else is in the batch: every product has a fixed shape (a tile of rows for the
layers, a query against a page for attention), so how much there is to do changes only how many of them there are.
That holds where one or two threads compute in float32 on a CPU. With more threads, torch may round an activation
differently where two threads' shares meet, by about 1e-6 in a logprob; on a GPU it has not been tried.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trainer.engine.torch.attention import Reads, attend
from trainer.engine.torch.forward import Piece
from trainer.engine.torch.slab import Shape, Slab
from trainer.engine.torch.weights import Weights
from trainer.vision.family import NAMES

TILE = 16
"""Rows in one product."""
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
"""Positions mean the same however long the sequence becomes."""


def unfit(model: PreTrainedModel) -> str | None:
    """Why this model cannot run here, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in {"llama", "qwen2", "qwen3", *NAMES}:
        return f"its type is {kind}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if rope not in STATIC_ROPE:
        return f"its rope is {rope}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return "not all of its layers attend to everything"
    return None


class Dense:
    """A copy of the model's weights, and the arithmetic of its layers."""

    notes: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        config, state = model.config.get_text_config(decoder=True), model.state_dict()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = Shape(config.num_hidden_layers, config.num_key_value_heads, size, model.dtype, model.device)
        self.context: int = config.max_position_embeddings
        self.vocabulary: int = config.vocab_size
        self._queries: int = config.num_attention_heads
        self._epsilon: float = config.rms_norm_eps
        words: Any = getattr(model.model, "language_model", model.model)
        self._rotary = copy.deepcopy(words.rotary_emb)
        self._turns = (torch.empty(0), torch.empty(0))
        self._weights = Weights(_joined(model, config, state), state)
        self._layers = [_Layer(self._weights, index) for index in range(self.shape.layers)]

    def take(self, weights: Mapping[str, Tensor]) -> None:
        self._weights.take(weights)

    def __call__(self, pieces: Sequence[Piece], slab: Slab) -> Tensor:
        reads = Reads(pieces, self.shape)
        padding = -reads.count % TILE
        ids = torch.tensor([token for piece in pieces for token in piece.ids] + [0] * padding, device=self.shape.device)
        turns = self._turned(max(piece.end for piece in pieces), F.pad(reads.places, (0, padding)))
        return self._run(F.embedding(ids, self._weights["embed"]), turns, reads, slab)

    def _run(
        self, x: Tensor, turns: tuple[Tensor, Tensor], reads: Reads, slab: Slab, deep: Sequence[Tensor] = ()
    ) -> Tensor:
        """`deep` is added after the first layers, if there is any."""
        for index, layer in enumerate(self._layers):
            x = self._attention(x, layer, turns, (reads, slab.values[index]))
            x = self._mlp(x, layer)
            if index < len(deep):
                x = x + deep[index]
        ends = [end - 1 for _, end in pairwise(reads.borders)]
        last = torch.tensor(ends + [0] * (-len(ends) % TILE), device=self.shape.device)
        hidden = self._norm(x[last], self._weights["norm"])
        return _linear(hidden, self._head)[: len(ends)]

    @property
    def _head(self) -> Tensor:
        head = self._weights.get("head")
        return self._weights["embed"] if head is None else head

    def _attention(self, x: Tensor, layer: _Layer, turns: tuple[Tensor, Tensor], into: tuple[Reads, Tensor]) -> Tensor:
        reads, slab = into
        heads, size = self.shape.heads, self.shape.size
        mixed = _linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).view(len(x), -1, size)
        turned, values = mixed[:, :-heads], mixed[:, -heads:]
        if layer.head_norms is not None:
            turned = self._norm(turned, layer.head_norms.view(-1, size))
        turned = turned * turns[0] + turned.roll(size // 2, -1) * turns[1]
        slab[0, reads.slots, :, reads.places] = turned[: reads.count, -heads:]
        slab[1, reads.slots, :, reads.places] = values[: reads.count]
        seen = attend(turned[: reads.count, :-heads], slab, reads)
        return _linear(F.pad(seen, (0, 0, 0, len(x) - reads.count)), layer.out, layer.out_bias, x)

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = _linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return _linear(F.silu(gate) * up, layer.down, layer.down_bias, x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return weight * (wide * scale).to(x.dtype)

    def _turned(self, length: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for these places; the table grows with the longest row."""
        if length > len(self._turns[0]):
            span = torch.arange(2 * length, device=self.shape.device)[None]
            self._turns = self._rotated(span)
        return self._turns[0][places][:, None], self._turns[1][places][:, None]

    def _rotated(self, places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(torch.empty(0, dtype=self.shape.dtype, device=self.shape.device), places)
        half = self.shape.size // 2
        return cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)


class _Layer:
    def __init__(self, weights: Weights, index: int) -> None:
        def find(name: str) -> Tensor | None:
            return weights.get(f"{index}.{name}")

        def get(name: str) -> Tensor:
            return weights[f"{index}.{name}"]

        self.norm, self.mlp_norm, self.head_norms = get("norm"), get("mlp_norm"), find("head_norms")
        self.qkv, self.qkv_bias = get("qkv.weight"), find("qkv.bias")
        self.out, self.out_bias = get("out.weight"), find("out.bias")
        self.gate_up, self.gate_up_bias = get("gate_up.weight"), find("gate_up.bias")
        self.down, self.down_bias = get("down.weight"), find("down.bias")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """In tiles of a fixed shape, added to `onto` if given."""
    tiles = len(x) // TILE
    right = weight.t().expand(tiles, -1, -1)
    left = x.view(tiles, TILE, -1)
    if onto is not None:
        result = torch.baddbmm(onto.view(tiles, TILE, -1), left, right).view(len(x), -1)
        return result if bias is None else result + bias
    result = torch.bmm(left, right).view(len(x), -1)
    return result if bias is None else result + bias


def _joined(model: PreTrainedModel, config: object, state: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """The engine's names, and the model's tensors that each is made of."""
    words = "model.language_model." if hasattr(model.model, "language_model") else "model."
    joined: dict[str, tuple[str, ...]] = {"embed": (words + "embed_tokens.weight",), "norm": (words + "norm.weight",)}
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:  # type: ignore[no-untyped-call]
        joined["head"] = ("lm_head.weight",)
    heads = (getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0))
    for index in range(getattr(config, "num_hidden_layers", 0)):
        layer = f"{words}layers.{index}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        joined[f"{index}.norm"] = (layer + "input_layernorm.weight",)
        joined[f"{index}.mlp_norm"] = (layer + "post_attention_layernorm.weight",)
        if attention + "q_norm.weight" in state:
            norms = (attention + "q_norm.weight",) * heads[0] + (attention + "k_norm.weight",) * heads[1]
            joined[f"{index}.head_norms"] = norms
        products = {
            "qkv": (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            "out": (attention + "o_proj",),
            "gate_up": (mlp + "gate_proj", mlp + "up_proj"),
            "down": (mlp + "down_proj",),
        }
        for name, parts in products.items():
            for kind in ("weight", "bias"):
                if f"{parts[0]}.{kind}" in state:
                    joined[f"{index}.{name}.{kind}"] = tuple(f"{part}.{kind}" for part in parts)
    return joined

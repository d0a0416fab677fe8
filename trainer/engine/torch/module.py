"""A model without arithmetic of ours runs through its own module, a row at a time: slower, and it says so."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from trainer.engine.base import EngineError
from trainer.engine.torch.forward import Piece
from trainer.engine.torch.slab import Shape, Slab
from trainer.engine.torch.weights import check


class Module:
    """A copy of the module. Its rounding may depend on how much of a row was known, never on the row's neighbours."""

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        self._model = copy.deepcopy(model).train(False)
        self.notes: tuple[str, ...] = (f"runs through its own module, one row at a time, since {why}",)
        config = model.config.get_text_config(decoder=True)
        try:
            self.context: int = config.max_position_embeddings
            self.vocabulary: int = config.vocab_size
            with torch.inference_mode():
                _, cache = self._call(torch.zeros(1, 1, dtype=torch.long, device=model.device), DynamicCache())
            keys = _keys(cache)
        except Exception as error:  # a model's own code fails in its own ways
            raise EngineError(f"the torch engine cannot run a model of type {config.model_type}: {error}") from error
        self.shape = Shape(keys.shape[0], keys.shape[2], keys.shape[4], keys.dtype, model.device)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        state = self._model.state_dict()
        check(weights, {name: tensor.shape for name, tensor in state.items()}, state)
        self._model.load_state_dict(weights)

    def __call__(self, pieces: Sequence[Piece], slab: Slab) -> Tensor:
        return torch.cat([self._one(piece, slab) for piece in pieces])

    def _one(self, piece: Piece, slab: Slab) -> Tensor:
        known = slab.values[:, :, piece.slot, :, : piece.start]
        cache = DynamicCache()
        if piece.start:
            for layer, (keys, values) in enumerate(known):
                cache.update(keys[None], values[None], layer)
        ids = torch.tensor([list(piece.ids)], device=self.shape.device)
        logits, cache = self._call(ids, cache)
        slab.write(piece.slot, piece.start, _keys(cache)[:, :, :, piece.start :])
        return logits

    def _call(self, ids: Tensor, cache: DynamicCache) -> tuple[Tensor, DynamicCache]:
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values


def _keys(cache: DynamicCache) -> Tensor:
    """Axes: layer, key or value, head, position, size; only a cache that keeps each position alike has them."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    pairs = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
    if not pairs or len(pairs) < len(cache.layers) or len({tensor.shape for pair in pairs for tensor in pair}) > 1:
        raise EngineError("its cache is not a key and a value, alike for each position of each layer")
    return torch.stack([torch.stack((keys[0], values[0])) for keys, values in pairs])

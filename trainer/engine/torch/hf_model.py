"""The embedded engine's fallback: runs any Hugging Face model through its own module, one sequence at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from trainer.engine.base import EngineError
from trainer.engine.torch.dense_model import BFLOAT16_NOTE
from trainer.engine.torch.kv_cache import Chunk, KVCache, KVShape
from trainer.engine.torch.weights import check_weights


class HFModel:
    """A copy of the module. Rounding may depend on how much of a sequence was cached, but not on other sequences."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        self._model = copy.deepcopy(model).train(False)
        self.notes: tuple[str, ...] = (f"runs through its own module, one sequence at a time, since {reason}",)
        # Its name until transformers 5.24, and since.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        config = model.config.get_text_config(decoder=True)
        try:
            self.context_length: int = config.max_position_embeddings
            self.vocab_size: int = config.vocab_size
            cache = DynamicCache()
            with torch.inference_mode():
                self._forward(torch.zeros(1, 1, dtype=torch.long, device=model.device), cache)
            values = _stack_cache(cache)
        except Exception as error:  # boundary: a model's own code may raise anything
            raise EngineError(f"the torch engine cannot run a model of type {config.model_type}: {error}") from error
        self.is_exact = values.dtype is torch.float32
        self.notes += () if self.is_exact else (BFLOAT16_NOTE,)
        self.shape = KVShape(values.shape[0], values.shape[2], values.shape[4], values.dtype, model.device)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        state = self._model.state_dict()
        check_weights(weights, {name: tensor.shape for name, tensor in state.items()}, state)
        self._model.load_state_dict(weights)

    def __call__(self, chunks: Sequence[Chunk], kv_cache: KVCache) -> Tensor:
        return torch.cat([self._run_chunk(chunk, kv_cache) for chunk in chunks])

    def _run_chunk(self, chunk: Chunk, kv_cache: KVCache) -> Tensor:
        cached = kv_cache.values[:, :, chunk.slot, :, : chunk.start]
        cache = DynamicCache()
        if chunk.start:
            for layer, (keys, values) in enumerate(cached):
                cache.update(keys[None], values[None], layer)
        ids = torch.tensor([list(chunk.ids)], device=self.shape.device)
        logits = self._forward(ids, cache)
        kv_cache.write(chunk.slot, chunk.start, _stack_cache(cache)[:, :, :, chunk.start :])
        return logits

    def _forward(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        """The last token's logits; the cache grows by the tokens."""
        out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        logits: Tensor = out.logits[:, -1]
        return logits


def _stack_cache(cache: DynamicCache) -> Tensor:
    """Axes: layer, key or value, head, position, size. Raises for caches of another structure."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    pairs = [(layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None]
    if not pairs or len(pairs) < len(cache.layers) or len({tensor.shape for pair in pairs for tensor in pair}) > 1:
        raise EngineError("its cache does not have a key and a value of the same shape for each position of each layer")
    return torch.stack([torch.stack((keys[0], values[0])) for keys, values in pairs])

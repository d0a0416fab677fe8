"""Chooses how the embedded engine holds the weights: copied, shared with the trainer, or in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trainer.engine.torch.dense_model import TILE
from trainer.engine.torch.weights import Holding

MIN_SHARED = 16_000_000
"""Parameters from which weights are shared: below, the larger products of a fused copy are worth its memory."""
MIN_BFLOAT16 = 100_000_000
"""Parameters from which bfloat16 is tried: a smaller model is quick enough with exact logprobs."""
MIN_SPEEDUP = 1.5
"""How much faster products in bfloat16 have to be to be worth logprobs that are not exact."""
CPU_FEATURES = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Names under which torch lists instructions for products in bfloat16."""
ROUNDS = 3


def is_half(dtype: str, device: str, trained: str = "auto") -> bool:
    """Whether the engine computes everything in bfloat16: on CUDA, as a trainer with `update.dtype` does."""
    if dtype == "auto":
        return device == "cuda" and trained != "float32" and torch.cuda.is_bf16_supported()
    return device == "cuda" and dtype == "bfloat16"


def can_decode_ahead(holding: Holding, *, deterministic: bool) -> bool:
    """Whether layers of the engine's own may decode ahead of the host, whose kernels depend on the batch."""
    return holding == "bfloat16" or not deterministic


def choose_holding(dtype: str, parameters: int, matrix: tuple[int, int], *, device: str, can_share: bool) -> Holding:
    """How to hold a model of this many parameters, unless `is_half`, with the setting `engine_dtype`.

    `matrix` is the shape of the largest weight of its layers; `can_share`: a trainer in this process has the same
    weights, and takes turns with the engine.
    """
    is_large = device == "cpu" and parameters >= MIN_BFLOAT16
    if dtype == "bfloat16" or (dtype == "auto" and is_large and bfloat16_speedup(matrix) >= MIN_SPEEDUP):
        return "bfloat16"
    return "shared" if can_share and device == "cpu" and parameters >= MIN_SHARED else "copied"


def largest_matrix(model: PreTrainedModel) -> tuple[int, int]:
    """The shape of the largest weight of the model's layers."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size, config.hidden_size


@lru_cache
def bfloat16_speedup(matrix: tuple[int, int]) -> float:
    """How much faster this processor multiplies a tile of rows by a matrix in bfloat16 than the engine does in float32;
    0 without instructions for it."""
    if not any(torch.cpu.get_capabilities().get(name) for name in CPU_FEATURES):
        return 0.0
    weight, rows = torch.ones(matrix), torch.ones(TILE, matrix[1])
    half_weight, half_rows = weight.bfloat16(), rows.bfloat16()
    with torch.inference_mode():
        exact_s = _measure(lambda: torch.bmm(rows[None], weight.t()[None]))
        half_s = _measure(lambda: F.linear(half_rows, half_weight))
    return exact_s / half_s


def _measure(multiply: Callable[[], Tensor]) -> float:
    """The seconds of the fastest of a few rounds; a first one prepares the kernel."""
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds[1:]), 1e-9)

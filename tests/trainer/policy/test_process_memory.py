"""Freed memory that the heap keeps goes back to the system, where a model is large enough for it to matter."""

from __future__ import annotations

import torch
from torch import nn

from trainer.policy.process_memory import TRIMMED_WEIGHTS, resident_memory, trim_heap

MEGABYTE = 2**20


def test_heap_of_a_large_model_is_trimmed_and_that_of_a_small_one_is_left() -> None:
    small, large = nn.Linear(8, 8), nn.Linear(4096, TRIMMED_WEIGHTS // 4096, bias=False)
    tensors = [torch.ones(2**14) for _ in range(2000)]
    last = tensors.pop()  # At the heap's end, which could shrink otherwise.
    tensors.clear()
    kept = resident_memory()
    trim_heap(small)
    left = resident_memory()
    assert left > kept - 16 * MEGABYTE
    trim_heap(large)
    assert resident_memory() < left - 64 * MEGABYTE
    assert last.sum() == 2**14

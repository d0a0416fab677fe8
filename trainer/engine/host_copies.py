"""Copies of tensors in the host's memory, which later steps do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that every tensor's place is a multiple of, so that it can be read as any dtype."""


class HostCopies(dict[str, Tensor]):
    """Tensors by name, copied into the same blocks again and again: two copies at once would need twice the memory.

    Copies from a GPU go to pinned memory, which is several times as fast. Torch rounds each pinned block up to a power
    of two, so the tensors share blocks of such a size. Not measured on a GPU yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout: Sequence[tuple[str, torch.Size, torch.dtype]] = ()

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all tensors, and forgets what is not among them."""
        named = list(tensors)
        pinned = any(tensor.is_cuda for _, tensor in named)
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in named]
        if layout != self._layout:
            self.clear()
            self._layout = layout
            places = allocate([tensor for _, tensor in named], pinned=pinned)
            self.update(zip((name for name, _ in named), places, strict=True))
        for name, tensor in named:
            self[name].copy_(tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.current_stream().synchronize()


def allocate(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Room for each tensor, in blocks of a power of two that hold the largest."""
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    size = 1 << max(largest - 1, ALIGNMENT - 1).bit_length()
    places, block, used = [], torch.empty(0, dtype=torch.uint8), size
    for tensor in tensors:
        if used + tensor.nbytes > size:
            block, used = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), 0
        places.append(block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places

"""Copies of tensors in the host's memory, which later steps do not change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies(dict[str, Tensor]):
    """Tensors by name, copied into the same buffers again and again: two copies at once would need twice the memory.

    Buffers for tensors of a GPU are pinned, so that copies of all of them are under way together.
    """

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all tensors, and forgets what is not among them."""
        before = dict(self)
        self.clear()
        on_gpu = False
        for name, tensor in tensors:
            on_gpu = on_gpu or tensor.is_cuda
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self[name] = buffer.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()

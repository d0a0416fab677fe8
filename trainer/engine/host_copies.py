"""Copies of tensors in the host's memory, which later steps do not change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies(dict[str, Tensor]):
    """Tensors by name, copied into the same buffers again and again: two copies at once would need twice the memory.

    They are not pinned: torch rounds each pinned block up to a power of two, which for models of Qwen is nearly twice
    their size.
    """

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies all tensors, and forgets what is not among them."""
        before = dict(self)
        self.clear()
        for name, tensor in tensors:
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            self[name] = buffer.copy_(tensor)

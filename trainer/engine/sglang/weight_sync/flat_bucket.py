"""Buckets in SGLang's own layout: one tensor of bytes, and what is where in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from trainer.engine.sglang.weight_sync.base import NamedTensor

LOAD_FORMAT = {"load_format": "flattened_bucket"}
"""The field of a request by which a server expects it."""


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """The bytes of some tensors."""

    data: Tensor
    parts: Sequence[SimpleNamespace]
    """Name, shape, dtype and place of each tensor."""
    load_format = LOAD_FORMAT

    @property
    def is_on_gpu(self) -> bool:
        return self.data.is_cuda

    @property
    def content(self) -> dict[str, object]:
        """As a server reads it, of plain values that its unpickler accepts."""
        return {"flattened_tensor": self.data, "metadata": [*self.parts]}


def flatten_bucket(bucket: Sequence[NamedTensor], device: torch.device | None = None) -> FlatBucket:
    """Copies tensors into one. The widest types come first, so that each tensor begins at a multiple of its width."""
    bucket = sorted(bucket, key=lambda named: -named[1].itemsize)
    data = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket]).to(device)
    parts, start = [], 0
    for name, tensor in bucket:
        stop = start + tensor.nbytes
        index = {"start_idx": start, "end_idx": stop, "numel": tensor.nbytes}
        parts.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **index))
        start = stop
    return FlatBucket(data, parts)

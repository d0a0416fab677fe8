"""Weights go as one flat tensor after the other: by their bytes, or on a GPU by where they lie in its memory."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
from anyio import to_thread
from torch import Tensor

from trainer.engine.sglang.publish.way import Named, Target, buckets, distinct, told, updating, within_s
from trainer.engine.sglang.together import together

BUCKET = 2**28
"""Bytes; a server needs as many beside its weights."""


class ByTensors:
    name = "tensors"

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        """Where the trainer's weights were, if ever on a GPU: a copy of them goes the same way, part by part."""

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        parts = list(buckets(distinct(weights), BUCKET))
        device = parts[0][0][1].device
        self._device = device if device.type == "cuda" else self._device
        await together(partial(self._sent, target, parts, version, flush) for target in targets)

    async def _sent(self, target: Target, parts: list[list[Named]], version: int, flush: bool) -> None:
        async with updating(target):
            for place, part in enumerate(parts):
                last = place == len(parts) - 1
                flat = await to_thread.run_sync(flattened, part, self._device)  # Kept until the server has answered.
                body = await to_thread.run_sync(_body, flat, target.facts.ranks, version if last else None, flush)
                await told(target.wire, "/update_weights_from_tensor", body, within=within_s(part))

    async def close(self) -> None:
        """It holds nothing."""


def flattened(part: Sequence[Named], device: torch.device | None = None) -> dict[str, object]:
    """As SGLang's own bucket is: plain values, which its unpickling takes from anyone."""
    flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in part]).to(device)
    metadata, start = [], 0
    for name, tensor in part:
        stop = start + tensor.nbytes
        place = {"start_idx": start, "end_idx": stop, "numel": tensor.nbytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
        start = stop
    return {"flattened_tensor": flat, "metadata": metadata}


def _body(flat: dict[str, object], ranks: int, version: int | None, flush: bool) -> bytes:
    """A handle on a GPU's memory is counted, so each of the server's processes is given one of its own."""
    body = {
        "serialized_named_tensors": [base64.b64encode(_pickled(flat)).decode() for _ in range(ranks)],
        "load_format": "flattened_bucket",
        "flush_cache": flush and version is not None,
    }
    return json.dumps(body | ({} if version is None else {"weight_version": str(version)})).encode()


def _pickled(flat: dict[str, object]) -> bytes:
    """The bytes themselves, but for a GPU's: a handle on shared memory of ours would end a server that knows us not."""
    tensor = flat["flattened_tensor"]
    if not (isinstance(tensor, Tensor) and tensor.is_cuda):
        return pickle.dumps(flat)
    written = io.BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(flat)
    return written.getvalue()

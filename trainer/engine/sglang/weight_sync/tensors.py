"""Weight sync by tensors: sends flattened buckets over HTTP, as bytes or on a GPU as CUDA IPC handles."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.reduction import ForkingPickler

import torch
from anyio import to_thread
from torch import Tensor

from trainer.engine.sglang.http_client import run_all
from trainer.engine.sglang.weight_sync.base import (
    SyncTarget,
    bucket_size,
    load_timeout_s,
    post_checked,
    selector,
    split_into_buckets,
    weight_update,
)
from trainer.engine.sglang.weight_sync.flat_bucket import LOAD_FORMAT, FlatBucket, flatten_bucket

BUCKET = 2**28
"""Bytes in a bucket; a server needs as many beside its weights."""


class TensorSync:
    """Sends weights in the body of requests."""

    name = "tensors"

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        """Where the trainer's weights were, if ever on a GPU: copies of them are sent from there, too, bucket by
        bucket."""

    async def send(
        self, targets: Sequence[SyncTarget], weights: Mapping[str, Tensor], version: int, flush: bool
    ) -> int:
        size, parts = 0, split_into_buckets(weights, BUCKET, targets)
        async with AsyncExitStack() as stack:
            for index in range(len(parts)):
                part = await to_thread.run_sync(parts.__getitem__, index)
                device = part[0][1].device
                self._device = device if device.type == "cuda" else self._device
                if not index:
                    for target in targets:
                        await stack.enter_async_context(weight_update(target))
                size += bucket_size(part)
                within = load_timeout_s(bucket_size(part))
                flat = await to_thread.run_sync(flatten_bucket, part, self._device)  # Until all servers have answered.
                del part  # So that there is one bucket at a time.
                last = version if index == len(parts) - 1 else None
                make_body = partial(_update_body, flat, last, flush, selector(targets))
                await _send_bucket(targets, make_body, within, is_shared=not flat.is_on_gpu)
                del flat
        return size

    async def close(self) -> None:
        """Holds no resources."""


async def _send_bucket(
    targets: Sequence[SyncTarget], make_body: Callable[[int], bytes], within: float, *, is_shared: bool
) -> None:
    """Sends a bucket to all servers. `is_shared`: servers of as many ranks get the same bytes, which are made once."""
    bodies: dict[int, bytes] = {}
    for ranks in sorted({target.features.ranks for target in targets}) if is_shared else ():
        bodies[ranks] = await to_thread.run_sync(make_body, ranks)

    async def send(target: SyncTarget) -> None:
        body = bodies.get(target.features.ranks)
        if body is None:
            body = await to_thread.run_sync(make_body, target.features.ranks)
        await post_checked(target.client, "/update_weights_from_tensor", body, within=within)

    await run_all(partial(send, target) for target in targets)


def _update_body(flat: FlatBucket, version: int | None, flush: bool, more: Mapping[str, str], ranks: int) -> bytes:
    """The request body. CUDA handles are reference-counted, so each process of the server gets its own."""
    count = ranks if flat.is_on_gpu else 1
    body = {
        "serialized_named_tensors": [base64.b64encode(_pickle(flat)).decode() for _ in range(count)] * (ranks // count),
        "flush_cache": flush and version is not None,
    }
    return json.dumps(
        body | LOAD_FORMAT | {**more} | ({} if version is None else {"weight_version": str(version)})
    ).encode()


def _pickle(flat: FlatBucket) -> bytes:
    """Pickles a bucket: its bytes, or a CUDA handle. A handle of shared CPU memory would crash a server outside our
    process tree."""
    if not flat.is_on_gpu:
        return pickle.dumps(flat.content)
    written = io.BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(flat.content)
    return written.getvalue()

"""Weight sync by tensors: sends flattened buckets over HTTP, as bytes or on a GPU as CUDA IPC handles.

Where all servers have our loader, they get changed values alone, always as bytes.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.reduction import ForkingPickler
from secrets import randbits

import torch
from anyio import to_thread
from torch import Tensor

from trainer.engine.sglang.http_client import ServerUnavailable, run_all
from trainer.engine.sglang.weight_sync.base import (
    NO_BASE,
    BaseWeights,
    SyncTarget,
    bucket_size,
    load_timeout_s,
    post_checked,
    selector,
    split_into_buckets,
    weight_update,
)
from trainer.engine.sglang.weight_sync.flat_bucket import FlatBucket, flatten_bucket
from trainer.engine.sglang.weight_sync.load_changes import LOADER, SENDER, ChangedBucket, find_changes

log = logging.getLogger(__name__)
Bucket = FlatBucket | ChangedBucket
BUCKET = 2**28
"""Bytes in a bucket; a server needs as many beside its weights."""


class TensorSync:
    """Sends weights in the body of requests."""

    name = "tensors"

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        """Where the trainer's weights were, if ever on a GPU: copies of them are sent from there, too, bucket by
        bucket."""
        self._keeping: set[str] = set()
        """The addresses of servers whose loader keeps all that they were sent last."""
        self._have_loader: set[str] = set()
        """The addresses of servers that used the loader once, so that they can import it."""
        self._loader_failed = False
        """A server was lost as it used the loader for the first time, as one that cannot import it."""
        self._sender = SENDER, torch.tensor(randbits(62))

    async def send(
        self,
        targets: Sequence[SyncTarget],
        weights: Mapping[str, Tensor],
        version: int,
        flush: bool,
        base: BaseWeights = NO_BASE,
    ) -> int:
        size, parts = 0, split_into_buckets(weights, BUCKET, targets)
        urls = {target.client.url for target in targets}
        all_keep, self._keeping = urls <= self._keeping, self._keeping - urls
        is_tried, copies = urls <= self._have_loader, max(target.features.ranks for target in targets)
        uses_loader = not self._loader_failed and all(target.features.loads_changes for target in targets)
        known: Mapping[str, Tensor] = {}
        if uses_loader and all_keep and await _all_have(targets, base.version):
            known = base.tensors
        async with AsyncExitStack() as stack:
            for index in range(len(parts)):
                part = await to_thread.run_sync(parts.__getitem__, index)
                device = part[0][1].device
                self._device = device if device.type == "cuda" else self._device
                if not index:
                    for target in targets:
                        await stack.enter_async_context(weight_update(target))
                within = load_timeout_s(bucket_size(part) * copies)
                if uses_loader:
                    part = await to_thread.run_sync(find_changes, part, known)
                    bucket: Bucket = ChangedBucket([self._sender, *part])  # Until all servers have answered.
                else:
                    bucket = await to_thread.run_sync(flatten_bucket, part, self._device)
                size += bucket_size(part)
                del part  # So that there is one bucket at a time.
                last = version if index == len(parts) - 1 else None
                make_body = partial(_update_body, bucket, last, flush, selector(targets))
                try:
                    # A loader that is missing ends a server: it is tried on one after the other.
                    at_once = len(targets) if is_tried or index or not uses_loader else 1
                    await _send_bucket(targets, make_body, within, at_once, is_shared=not bucket.is_on_gpu)
                except ServerUnavailable as error:
                    if uses_loader and not is_tried:
                        self._loader_failed = True
                        log.warning("%s, at its first weights for %s: from now on, no server gets any", error, LOADER)
                    raise
                del bucket
        if uses_loader:
            self._keeping |= urls
            self._have_loader |= urls
        return size

    async def close(self) -> None:
        """Holds no resources."""


async def _all_have(targets: Sequence[SyncTarget], version: int) -> bool:
    """Whether servers report a version: one that somebody else restarted does not."""
    found = [(await target.client.get("/model_info"))["weight_version"] for target in targets]
    return found == [str(version)] * len(targets)


async def _send_bucket(
    targets: Sequence[SyncTarget], make_body: Callable[[int], bytes], within: float, at_once: int, *, is_shared: bool
) -> None:
    """Sends a bucket to all servers, so many at once. `is_shared`: servers of as many ranks get the same bytes, which
    are made once."""
    bodies: dict[int, bytes] = {}
    for ranks in sorted({target.features.ranks for target in targets}) if is_shared else ():
        bodies[ranks] = await to_thread.run_sync(make_body, ranks)

    async def send(target: SyncTarget) -> None:
        body = bodies.get(target.features.ranks)
        if body is None:
            body = await to_thread.run_sync(make_body, target.features.ranks)
        await post_checked(target.client, "/update_weights_from_tensor", body, within=within)

    for some in range(0, len(targets), at_once):
        await run_all(partial(send, target) for target in targets[some : some + at_once])


def _update_body(bucket: Bucket, version: int | None, flush: bool, more: Mapping[str, str], ranks: int) -> bytes:
    """The request body. CUDA handles are reference-counted, so each process of the server gets its own."""
    count = ranks if bucket.is_on_gpu else 1
    pickled = [base64.b64encode(_pickle(bucket)).decode() for _ in range(count)]
    body = {"serialized_named_tensors": pickled * (ranks // count), "flush_cache": flush and version is not None}
    body |= {**bucket.load_format, **more}
    return json.dumps(body | ({} if version is None else {"weight_version": str(version)})).encode()


def _pickle(bucket: Bucket) -> bytes:
    """Pickles a bucket: its bytes, or a CUDA handle. A handle of shared CPU memory would crash a server outside our
    process tree."""
    if not bucket.is_on_gpu:
        return pickle.dumps(bucket.content)
    written = io.BytesIO()
    ForkingPickler(written, pickle.HIGHEST_PROTOCOL).dump(bucket.content)
    return written.getvalue()

"""The WeightSync interface, and what its implementations share: update calls, timeouts, buckets.

The caller pauses the servers before and verifies them after.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import torch
from torch import Tensor

from trainer.engine.base import BucketedWeights, Buckets, EngineError, plan_buckets
from trainer.engine.sglang.http_client import REQUEST_TIMEOUT_S, RequestRefused, SGLangClient
from trainer.engine.sglang.server_features import BEGIN_UPDATE, END_UPDATE, ServerFeatures

LOAD_TIMEOUT_S = 60.0
"""Timeout for a server to load the smallest part of the weights."""
MIN_BYTES_PER_S = 200e6
"""The slowest loading speed, in bytes per second, from any disk or network."""
NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class SyncTarget:
    """A server that gets weights."""

    client: SGLangClient
    features: ServerFeatures


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Weights that servers may have, so that they need changes of them alone."""

    version: int
    tensors: Mapping[str, Tensor]


NO_BASE = BaseWeights(-1, {})


class WeightSync(Protocol):
    """Sends weights to servers."""

    name: str

    async def send(
        self,
        targets: Sequence[SyncTarget],
        weights: Mapping[str, Tensor],
        version: int,
        flush: bool,
        base: BaseWeights = NO_BASE,
        /,
    ) -> int:
        """Sends weights to paused servers; returns the bytes that each of them got. Raises ServerUnavailable for lost
        servers, another EngineError for what must end the run."""
        ...

    async def close(self) -> None: ...


@asynccontextmanager
async def weight_update(target: SyncTarget) -> AsyncIterator[None]:
    """The calls that begin and end an update, where a release needs them. An update that a dead trainer left open is
    ended first."""
    if not target.features.has_update_calls:
        yield
        return
    try:
        await post_checked(target.client, BEGIN_UPDATE, selector([target]))
    except RequestRefused:
        await post_checked(target.client, END_UPDATE, {})
        await post_checked(target.client, BEGIN_UPDATE, selector([target]))
    try:
        yield
    except BaseException:
        with anyio.move_on_after(REQUEST_TIMEOUT_S, shield=True):
            await post_checked(target.client, END_UPDATE, {})
        raise
    await post_checked(target.client, END_UPDATE, {}, within=LOAD_TIMEOUT_S)


def selector(targets: Sequence[SyncTarget]) -> dict[str, str]:
    """The field by which a draft model is left as it is: SGLang would load the policy's weights into it, too."""
    return {"selector": "target"} if any(target.features.has_draft for target in targets) else {}


async def post_checked(
    client: SGLangClient, path: str, body: Mapping[str, Any] | bytes, *, within: float = REQUEST_TIMEOUT_S
) -> None:
    """Posts a request; raises RequestRefused also for a 200 whose body says that it failed."""
    answer = await client.post(path, body, within=within)
    if isinstance(answer, Mapping) and answer.get("success") is False:
        reason = answer.get("message") or answer.get("error_message")
        raise RequestRefused(f"SGLang at {client.url} refused {path}: {reason}", 200)


def load_timeout_s(size: int) -> float:
    """Timeout for loading so many bytes of weights; a server that needs longer counts as lost."""
    return LOAD_TIMEOUT_S + size / MIN_BYTES_PER_S


def bucket_size(bucket: Iterable[NamedTensor]) -> int:
    """The bytes of a bucket."""
    return sum(tensor.nbytes for _, tensor in bucket)


def untied_tensors(weights: Mapping[str, Tensor]) -> list[NamedTensor]:
    """The weights without tied duplicates, which a server ties itself."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept: list[NamedTensor] = []
    for name, tensor in weights.items():
        key = tensor.data_ptr(), tuple(tensor.shape)
        if key not in seen or not tensor.numel():
            kept.append((name, tensor.detach()))
        seen.add(key)
    if not kept:
        raise EngineError("no weights to publish; give the model's state_dict")
    return kept


def rename_tensors(
    weights: Mapping[str, Tensor], rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """The weights under their names in a checkpoint's files, which buckets have already."""
    return weights if isinstance(weights, BucketedWeights) else rename(dict(untied_tensors(weights)))


def split_into_buckets(weights: Mapping[str, Tensor], most: int, targets: Sequence[SyncTarget]) -> Buckets:
    """The weights in buckets of at most `most` bytes, or of one tensor, and in the servers' dtype if it is smaller."""
    parts: Buckets
    if isinstance(weights, BucketedWeights):
        parts = weights.buckets(most)
    else:
        tensors = dict(untied_tensors(weights))
        plan = plan_buckets({name: tensor.nbytes for name, tensor in tensors.items()}, most)
        parts = [[(name, tensors[name]) for name in names] for names in plan]
    dtypes = {find_dtype(target.features.dtype) for target in targets}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return parts if dtype is None else RoundedBuckets(parts, dtype)


@dataclass(frozen=True, slots=True)
class RoundedBuckets:
    """Buckets whose matrices are rounded when they are taken, as the servers would round them. Servers may have some
    vectors in float32, such as the bias of a router."""

    parts: Buckets
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int, /) -> list[NamedTensor]:
        return [(name, self._round(tensor)) for name, tensor in self.parts[index]]

    def _round(self, tensor: Tensor) -> Tensor:
        is_wider = tensor.is_floating_point() and tensor.itemsize > self.dtype.itemsize
        return tensor.to(self.dtype) if is_wider and tensor.dim() > 1 else tensor


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name in a server's options; None for `auto`, which depends on its model."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None

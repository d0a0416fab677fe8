"""A way takes weights to servers that stand still; whoever calls it stops them before and asks them after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
from torch import Tensor

from trainer.engine.base import EngineError
from trainer.engine.sglang.probe import BEGIN, END, Facts
from trainer.engine.sglang.wire import ASK_S, Refused, Wire

LOAD_S = 60.0
"""For a server to take in the smallest part of the weights."""
SLOW = 200e6
"""Bytes a second that it takes in at least, from whatever disk or network."""
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Target:
    wire: Wire
    facts: Facts


class Way(Protocol):
    name: str

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        """Raises Gone for servers that are not there any more, and another EngineError for what must not go on."""
        ...

    async def close(self) -> None: ...


@asynccontextmanager
async def updating(target: Target) -> AsyncIterator[None]:
    """Between beginning and end, where a release asks for that; one that a dead trainer left open is closed first."""
    if not target.facts.begins:
        yield
        return
    try:
        await told(target.wire, BEGIN, {})
    except Refused:
        await told(target.wire, END, {})
        await told(target.wire, BEGIN, {})
    ended = False
    try:
        yield
        ended = True
        await told(target.wire, END, {}, within=LOAD_S)
    finally:
        if not ended:
            with anyio.move_on_after(ASK_S, shield=True):
                await told(target.wire, END, {})


async def told(wire: Wire, path: str, body: Mapping[str, Any] | bytes, *, within: float = ASK_S) -> None:
    """Answers of 200 may be refusals as well."""
    answer = await wire.post(path, body, within=within)
    if isinstance(answer, Mapping) and answer.get("success") is False:
        raise Refused(f"SGLang at {wire.url} refused {path}: {answer.get('message')}", 200)


def within_s(weights: Iterable[Named]) -> float:
    """For a server to take these in; one that needs longer is held to be lost."""
    return LOAD_S + sum(tensor.nbytes for _, tensor in weights) / SLOW


def distinct(weights: Mapping[str, Tensor]) -> list[Named]:
    """Without those that are another's under a second name: a server ties them itself."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    kept: list[Named] = []
    for name, tensor in weights.items():
        place = tensor.data_ptr(), tuple(tensor.shape)
        if place not in seen or not tensor.numel():
            kept.append((name, tensor.detach()))
        seen.add(place)
    if not kept:
        raise EngineError("there are no weights to publish; give the model's state_dict")
    return kept


def buckets(weights: Iterable[Named], most: int) -> Iterator[list[Named]]:
    """Of at most so many bytes, or of one tensor."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket

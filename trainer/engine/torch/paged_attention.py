"""Attention over the KV cache: page by page, in products whose shape does not depend on the rest of the batch, or over
all positions at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.engine.torch.kv_cache import PAGE_SIZE, Chunk, KVCache, KVShape

MAX_COPIED_NUMBERS = 2**17
"""Up to this many numbers, a slot's keys are copied for each of its queries, to compute all heads in one product."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries that are computed together: one query each of consecutive slots, or several queries of one slot."""

    tokens: slice
    select: Callable[[Tensor], Tensor]
    """Takes from a layer's keys and values the positions of the slots that any of them attends to."""
    length: int
    """How many these are in each slot; a multiple of the page's size if `in_pages`."""
    bias: Tensor | None
    """Minus infinity where a query must not attend. Axes: query and key-value head, query head in that, position. None
    for a sequence from its start, of which each query attends to what is before it: that needs half the products."""
    is_per_query: bool
    """Each query has a slot of its own, or its own copy of a short one; otherwise all queries share one slot."""
    in_pages: bool
    """Computed page by page, rather than over all positions at once."""


class AttentionPlan:
    """Which queries attend to which slots in a step; computed once for all layers. Products have rows in tiles."""

    def __init__(self, chunks: Sequence[Chunk], shape: KVShape, kv_cache: KVCache, tile: int) -> None:
        device = shape.device
        self._in_pages, self._kv_cache = tile > 1, kv_cache
        self._offsets = list(accumulate((len(chunk.ids) for chunk in chunks), initial=0))
        self.count, self.rows = self._offsets[-1], len(chunks)
        ends = [end - 1 for end in self._offsets[1:]]
        self.last = torch.tensor(ends + [0] * (-self.rows % tile), device=device)
        """The tokens whose logits are wanted, and padding."""
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        self.positions = torch.tensor(positions, device=device)
        slots = torch.tensor([chunk.slot for chunk in chunks for _ in chunk.ids], device=device)
        self.places = kv_cache.places(slots, self.positions)
        self.groups = [self._group(chunks, span, shape) for span in _group_chunks(chunks)]

    def _group(self, chunks: Sequence[Chunk], span: slice, shape: KVShape) -> QueryGroup:
        grouped = chunks[span]
        tokens = slice(self._offsets[span.start], self._offsets[span.stop])
        length = max(chunk.end for chunk in grouped)
        if self._in_pages:
            length = -(-length // PAGE_SIZE) * PAGE_SIZE
        select = self._kv_cache.selector(slice(grouped[0].slot, grouped[-1].slot + 1), length)
        if not self._in_pages and len(grouped[0].ids) == length > 1:
            return QueryGroup(tokens, select, length, None, is_per_query=False, in_pages=False)
        positions = self.positions[tokens]
        masked = torch.arange(length, device=shape.device) > positions[:, None]
        bias = torch.zeros(masked.shape, dtype=shape.dtype, device=shape.device).masked_fill_(masked, -torch.inf)
        copied = bias.numel() * shape.heads * shape.head_dim
        is_per_query = len(grouped[0].ids) == 1 or (self._in_pages and copied <= MAX_COPIED_NUMBERS)
        if is_per_query and self._in_pages:
            bias = bias.repeat_interleave(shape.heads, dim=0)
        return QueryGroup(tokens, select, length, bias[:, None], is_per_query, self._in_pages)

    def attend(self, queries: Tensor, kv_layer: Tensor) -> Tensor:
        """Attention of queries (token, head, size) to one layer's keys and values; returns (token, head times size)."""
        by_head = queries.view(len(queries), kv_layer.shape[2], -1, queries.shape[-1])
        outputs = [_attend_group(by_head[group.tokens], group.select(kv_layer), group) for group in self.groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.view(len(queries), -1)


def _group_chunks(chunks: Sequence[Chunk]) -> Iterator[slice]:
    """Groups neighbours with one id each in consecutive slots; a longer chunk is a group of its own."""
    start = 0
    for index in range(1, len(chunks) + 1):
        if index < len(chunks):
            last, chunk = chunks[index - 1], chunks[index]
            if len(last.ids) == len(chunk.ids) == 1 and chunk.slot == last.slot + 1:
                continue
        yield slice(start, index)
        start = index


def _attend_group(queries: Tensor, kv_slots: Tensor, group: QueryGroup) -> Tensor:
    if group.in_pages:
        return (_attend_per_query if group.is_per_query else _attend_shared)(queries, kv_slots, group)
    keys, values = kv_slots
    if group.is_per_query and group.bias is not None:
        return F.scaled_dot_product_attention(queries, keys, values, group.bias[:, None]).flatten(2)
    by_head = queries.permute(1, 2, 0, 3).flatten(0, 1)[None]
    bias = None if group.bias is None else group.bias[:, 0]
    if bias is not None and queries.is_cuda:  # With fewer heads of keys, only the slow kernel takes a mask there.
        keys, values = (tensor.repeat_interleave(queries.shape[2], dim=1) for tensor in (keys, values))
    output = F.scaled_dot_product_attention(by_head, keys, values, bias, is_causal=bias is None, enable_gqa=True)
    return output[0].transpose(0, 1).reshape(*queries.shape[:2], -1)


def _attend_per_query(queries: Tensor, kv_slots: Tensor, group: QueryGroup) -> Tensor:
    count, heads, per_head, size = queries.shape
    keys, values = kv_slots.expand(-1, count, -1, -1, -1).flatten(1, 2)
    return _attend_pages(queries.reshape(-1, per_head, size), keys, values, group).view(count, heads, -1)


def _attend_shared(queries: Tensor, kv_slots: Tensor, group: QueryGroup) -> Tensor:
    """The same products head by head: a slot's keys can be expanded over queries only as one matrix."""
    keys, values = kv_slots[:, 0, :, None].expand(-1, -1, len(queries), -1, -1)
    return torch.stack(
        [_attend_pages(queries[:, head], keys[head], values[head], group) for head in range(queries.shape[1])], dim=1
    ).flatten(2)


def _attend_pages(queries: Tensor, keys: Tensor, values: Tensor, group: QueryGroup) -> Tensor:
    if len(queries) == 1:  # A single product is split among threads, and would be rounded otherwise.
        queries, keys, values = (tensor.expand(2, -1, -1) for tensor in (queries, keys, values))
        return _attend_pages(queries, keys, values, group)[:1]
    scale, bias = queries.shape[-1] ** -0.5, cast(Tensor, group.bias)
    pages = [slice(start, start + PAGE_SIZE) for start in range(0, group.length, PAGE_SIZE)]
    scores = [torch.baddbmm(bias[..., page], queries, keys[:, page].mT, alpha=scale) for page in pages]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)).float().softmax(-1).to(queries.dtype)
    output = torch.bmm(weights[..., :PAGE_SIZE], values[:, :PAGE_SIZE])
    for page in pages[1:]:
        output = torch.baddbmm(output, weights[..., page], values[:, page])
    return output

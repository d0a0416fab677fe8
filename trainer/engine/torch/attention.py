"""Each query sees its own row's slot, a page at a time, by products whose shape nothing else in the batch decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trainer.engine.torch.forward import Piece
from trainer.engine.torch.slab import PAGE, Shape

COPIED = 2**17
"""Numbers of keys that may be copied, one slot's for each of its queries, to have all heads in one product."""


@dataclass(frozen=True, slots=True)
class Run:
    """Queries that are attended together: one each of several slots in a row, or several of one slot."""

    tokens: slice
    slots: slice
    pages: int
    bias: Tensor
    """Minus infinity where a query must not look. Axes: query with key-value head, query head of that, position."""
    apart: bool
    """Each query has its own slot, or its own copy of a short one; otherwise all of them look at one as it is."""


class Reads:
    """What a step's queries look at; worked out once for all layers."""

    def __init__(self, pieces: Sequence[Piece], shape: Shape) -> None:
        device = shape.device
        self.borders = list(accumulate((len(piece.ids) for piece in pieces), initial=0))
        self.count = self.borders[-1]
        self.places = torch.tensor([at for piece in pieces for at in range(piece.start, piece.end)], device=device)
        self.slots = torch.tensor([piece.slot for piece in pieces for _ in piece.ids], device=device)
        self.runs = [self._run(pieces, span, shape) for span in _spans(pieces)]

    def _run(self, pieces: Sequence[Piece], span: slice, shape: Shape) -> Run:
        within = pieces[span]
        tokens = slice(self.borders[span.start], self.borders[span.stop])
        pages = -(-max(piece.end for piece in within) // PAGE)
        places = self.places[tokens]
        hidden = torch.arange(pages * PAGE, device=shape.device) > places[:, None]
        bias = torch.zeros(hidden.shape, dtype=shape.dtype, device=shape.device).masked_fill_(hidden, -torch.inf)
        apart = len(within[0].ids) == 1 or bias.numel() * shape.heads * shape.size <= COPIED
        if apart:
            bias = bias.repeat_interleave(shape.heads, dim=0)
        return Run(tokens, slice(within[0].slot, within[-1].slot + 1), pages, bias[:, None], apart)


def _spans(pieces: Sequence[Piece]) -> Iterator[slice]:
    """Neighbours in neighbouring slots with one id each go together; a longer piece goes alone."""
    start = 0
    for index in range(1, len(pieces) + 1):
        if index < len(pieces):
            last, piece = pieces[index - 1], pieces[index]
            if len(last.ids) == len(piece.ids) == 1 and piece.slot == last.slot + 1:
                continue
        yield slice(start, index)
        start = index


def attend(queries: Tensor, slab: Tensor, reads: Reads) -> Tensor:
    """`queries` of axes token, head, size against one layer's keys and values; axes token, head times size."""
    size = queries.shape[-1]
    heads = slab.shape[2]
    grouped = queries.view(len(queries), heads, -1, size)
    seen = [(_each if run.apart else _shared)(grouped[run.tokens], slab[:, run.slots], run) for run in reads.runs]
    joined = seen[0] if len(seen) == 1 else torch.cat(seen)
    return joined.view(len(queries), -1)


def _each(queries: Tensor, near: Tensor, run: Run) -> Tensor:
    count, heads, group, size = queries.shape
    keys, values = near[..., : run.pages * PAGE, :].expand(-1, count, -1, -1, -1).flatten(1, 2)
    return _paged(queries.reshape(-1, group, size), keys, values, run).view(count, heads, -1)


def _shared(queries: Tensor, near: Tensor, run: Run) -> Tensor:
    """The same products head by head, as a slot's keys can stand for each query only if they are one matrix."""
    keys, values = near[:, 0, :, None].expand(-1, -1, len(queries), -1, -1)
    return torch.stack(
        [_paged(queries[:, head], keys[head], values[head], run) for head in range(queries.shape[1])], dim=1
    ).flatten(2)


def _paged(queries: Tensor, keys: Tensor, values: Tensor, run: Run) -> Tensor:
    if len(queries) == 1:  # one product alone is divided among threads, several are dealt out: rounding would differ
        queries, keys, values = (tensor.expand(2, -1, -1) for tensor in (queries, keys, values))
        return _paged(queries, keys, values, run)[:1]
    scale = queries.shape[-1] ** -0.5
    borders = range(0, run.pages * PAGE, PAGE)
    scores = [
        torch.baddbmm(run.bias[..., at : at + PAGE], queries, keys[:, at : at + PAGE].mT, alpha=scale) for at in borders
    ]
    weights = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)).float().softmax(-1).to(queries.dtype)
    seen = torch.bmm(weights[..., :PAGE], values[:, :PAGE])
    for at in borders[1:]:
        seen = torch.baddbmm(seen, weights[..., at : at + PAGE], values[:, at : at + PAGE])
    return seen

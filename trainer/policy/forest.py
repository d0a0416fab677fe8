"""Rows that begin alike are computed once as far as they are alike: a step's rollouts are a forest, and its nodes run.

Two rollouts of one task, `q q a` and `q q b b`, are five nodes, since nothing that a causal model holds of a token
depends on what comes after it:

    at_T      0 1 2 0 1 3 4      of each token of the rows, its node
    ids_U     q q a b b          what the model runs
    places_U  0 1 2 2 3          where each stands in its row

Attention sees blocks of nodes. Short rows that are much alike are one block, in which each node sees its ancestors;
a long row is a block of its own, in which each node sees all before it. Nothing is padded but inside attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

WIDE = 512
"""Nodes of a block that is seen through a mask, at the most: longer rows are quicker alone, without one."""
ALIKE = 0.7
"""Blocks are padded to one size and attended together, if the smallest is at least this share of the largest."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one size."""

    at_BM: Tensor
    """Their nodes; a place that is padded names the first node."""
    seen_BMM: Tensor | None
    """Whom each node sees; None where it is all before it."""

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.at_BM.to(device), None if self.seen_BMM is None else self.seen_BMM.to(device))


@dataclass(frozen=True, slots=True)
class Forest:
    ids_U: Tensor
    places_U: Tensor
    at_T: Tensor
    blocks: tuple[Blocks, ...]
    back_U: Tensor
    """Of each node, where its result stands among those of all blocks, padding counted."""


@dataclass(slots=True)
class _Block:
    nodes: list[int]
    parents: list[int]
    """Each one's, as a place in the block; -1 for a root."""
    known: dict[int, int] = field(default_factory=dict)
    depth: int = 0
    """Of its longest row."""

    @property
    def path(self) -> bool:
        """A single row, though several may have it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def above(self) -> list[int]:
        """Parents, but a root is its own."""
        return [place if parent < 0 else parent for place, parent in enumerate(self.parents)]

    def add(self, row: Sequence[int]) -> None:
        self.depth = max(self.depth, len(row))
        last = -1
        for node in row:
            if node not in self.known:
                self.known[node] = len(self.nodes)
                self.nodes.append(node)
                self.parents.append(last)
            last = self.known[node]


def forest(ids_T: Tensor, sequence_T: Tensor) -> Forest:
    """Of rows that lie end to end. The same rows in the same order give the same forest."""
    ids, owners = ids_T.tolist(), sequence_T.tolist()
    seen: dict[tuple[int, int], int] = {}
    at: list[int] = []
    first: list[int] = []
    depths: list[int] = []
    rows: list[list[int]] = []
    for token, (id, owner) in enumerate(zip(ids, owners, strict=True)):
        if not token or owner != owners[token - 1]:
            rows.append([])
        parent = rows[-1][-1] if rows[-1] else -1
        node = seen.setdefault((parent, id), len(seen))
        if node == len(first):
            first.append(token)
            depths.append(len(rows[-1]))
        rows[-1].append(node)
        at.append(node)
    device = ids_T.device
    blocks, back = _laid(list(_blocks(rows)), len(first))
    first_U, depths_U, back_U, at_T = (torch.tensor(one, device=device) for one in (first, depths, back, at))
    return Forest(ids_T[first_U], depths_U, at_T, tuple(one.to(device) for one in blocks), back_U)


def places(sequence_T: Tensor) -> Tensor:
    """Each token's place in its own sequence, from 0."""
    count_T = torch.arange(len(sequence_T), device=sequence_T.device)
    first_T = torch.ones_like(sequence_T, dtype=torch.bool)
    first_T[1:] = sequence_T.diff() != 0
    return count_T - torch.where(first_T, count_T, 0).cummax(0).values


def _blocks(rows: Sequence[Sequence[int]]) -> Iterator[_Block]:
    """Neighbours go together as long as seeing them at once is no more work than seeing each alone."""
    block = _Block([], [])
    for row in rows:
        fresh = sum(node not in block.known for node in row)
        together = len(block.nodes) + fresh
        if block.nodes and (together > WIDE or together**2 > len(block.nodes) ** 2 + len(row) ** 2):
            yield block
            block = _Block([], [])
        block.add(row)
    yield block


def _laid(blocks: Sequence[_Block], nodes: int) -> tuple[list[Blocks], list[int]]:
    """Like sizes together, and of each node where it is found again."""
    order = sorted(range(len(blocks)), key=lambda place: (blocks[place].path, -len(blocks[place].nodes)))
    spans: list[list[_Block]] = []
    for place in order:
        block = blocks[place]
        like = spans and spans[-1][0].path == block.path and len(block.nodes) >= ALIKE * len(spans[-1][0].nodes)
        if like:
            spans[-1].append(block)
        else:
            spans.append([block])
    back, start = [0] * nodes, 0
    for span in spans:
        size = len(span[0].nodes)
        for block in span:
            for place, node in enumerate(block.nodes):
                back[node] = start + place
            start += size
    return [_padded(span) for span in spans], back


def _padded(span: Sequence[_Block]) -> Blocks:
    size = len(span[0].nodes)
    at_BM = torch.tensor([block.nodes + [0] * (size - len(block.nodes)) for block in span])
    if span[0].path:
        return Blocks(at_BM, None)
    up_BM = torch.tensor([block.above + list(range(len(block.nodes), size)) for block in span])
    seen_BMM = torch.eye(size, dtype=torch.bool).repeat(len(span), 1, 1)
    above_BM = up_BM
    for _ in range(max(block.depth for block in span)):
        seen_BMM.scatter_(2, above_BM[:, :, None], True)
        above_BM = up_BM.gather(1, above_BM)
    return Blocks(at_BM, seen_BMM)

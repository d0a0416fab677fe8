"""Computes shared prefixes of a step's sequences only once (tree attention): they form a forest of shared nodes.

Two rollouts of one task, `q q a` and `q q b b`, are five nodes, since a causal model's state at a token does not depend
on what comes after it:

    node_T       0 1 2 0 1 3 4      the node of each token of the rows
    ids_U        q q a b b          what the model runs
    positions_U  0 1 2 2 3          each node's position in its row

Attention on a GPU is one kernel over all nodes (`flex_forest`). The reference, and what a CPU does, works on blocks of
nodes: short rows with much in common are one block, in which each node sees its ancestors by a mask; a long row is a
block of its own with causal attention. Only attention pads anything.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trainer.algorithms.packing import move_tensor
from trainer.ledger import common_length

if TYPE_CHECKING:
    from trainer.policy.context_parallel import ContextGroup
    from trainer.policy.flex_forest import PreOrder

CONTEXT = "context_group"
"""The attribute of a model whose rows ranks share."""
MAX_BLOCK_NODES = 512
"""Largest block with a mask; longer rows are faster alone, without a mask."""
MIN_SIZE_RATIO = 0.7
"""Blocks are padded to one size and attended together if the smallest is at least this share of the largest."""


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Blocks that are padded to one size."""

    node_BM: Tensor
    """The nodes of each block; padding names node 0."""
    order_2BM: Tensor | None = None
    """The place of each node in pre-order, in which descendants follow without a gap, and the place after the last of
    them; None for causal attention."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    """By sliding window: layers share them."""

    def to(self, device: torch.device) -> AttentionBlocks:
        order_2BM = None if self.order_2BM is None else move_tensor(self.order_2BM, device)
        return AttentionBlocks(move_tensor(self.node_BM, device), order_2BM)

    def mask(self, window: int | None) -> Tensor | None:
        """Which nodes each node sees. Axes: block, head, position, position."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        """A sliding window counts positions of the row."""
        visible_BMM: Tensor | None = None
        size = self.node_BM.shape[1]
        if self.order_2BM is not None:
            place_BM, end_BM = self.order_2BM.unbind()
            query_BMM, key_BMM = place_BM[:, :, None], place_BM[:, None]
            visible_BMM = (key_BMM <= query_BMM) & (query_BMM < end_BM[:, None])
        if window is None or size <= window:
            return None if visible_BMM is None else visible_BMM[:, None]
        if visible_BMM is None:
            causal_MM = torch.ones(size, size, dtype=torch.bool, device=self.node_BM.device).tril()
            return causal_MM.triu(1 - window)
        depth_BM = visible_BMM.sum(-1)
        in_window_BMM = depth_BM[:, :, None] - depth_BM[:, None, :] < window
        return (visible_BMM & in_window_BMM)[:, None]


@dataclass(slots=True)
class PrefixForest:
    """The nodes of packed sequences, and the blocks that they attend in. Not frozen: of a frozen one, the compiler of
    torch 2.11 looks at all fields, and compiles layers again for each forest."""

    ids_U: Tensor
    positions_U: Tensor
    node_T: Tensor
    output_U: Tensor
    """Each node's index in the outputs of attention, padding included."""
    blocks: tuple[AttentionBlocks, ...] = ()
    pre_order: PreOrder | None = None
    """In place of blocks, for the one kernel."""
    context: ContextGroup | None = None
    """The ranks that share the nodes: `ids_U` and `positions_U` are those of this rank's."""
    own_N: Tensor | None = None
    """These nodes, where ranks share them."""

    def to(self, device: torch.device) -> PrefixForest:
        return PrefixForest(
            move_tensor(self.ids_U, device),
            move_tensor(self.positions_U, device),
            move_tensor(self.node_T, device),
            move_tensor(self.output_U, device),
            tuple(block.to(device) for block in self.blocks),
            self.pre_order and self.pre_order.to(device),
            self.context,
            None if self.own_N is None else move_tensor(self.own_N, device),
        )

    def share(self, context: ContextGroup) -> PrefixForest:
        """This rank's nodes; attention is over all."""
        own_N = context.own_nodes(len(self.ids_U))
        return replace(self, ids_U=self.ids_U[own_N], positions_U=self.positions_U[own_N], context=context, own_N=own_N)


@dataclass(slots=True)
class _BlockBuilder:
    """The nodes of a block while rows are added to it."""

    nodes: list[int]
    parents: list[int]
    """Each node's parent as an index into `nodes`; -1 for a root."""
    index_of: dict[int, int] = field(default_factory=dict)

    @property
    def is_path(self) -> bool:
        """Whether the block is a single row, which several sequences may share."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def add(self, row: Sequence[int]) -> None:
        last = -1
        for node in row:
            if node not in self.index_of:
                self.index_of[node] = len(self.nodes)
                self.nodes.append(node)
                self.parents.append(last)
            last = self.index_of[node]


def build_forest(ids_T: Tensor, sequence_T: Tensor, one_kernel: bool = False) -> PrefixForest:
    """Builds the forest of sequences that lie end to end, for the one kernel or for blocks; deterministic.

    A row shares most with a neighbour in lexical order, so each is compared with two of those before it.
    """
    ids = ids_T.tolist()
    sizes = torch.unique_consecutive(sequence_T, return_counts=True)[1].tolist()
    node_by_token: list[int] = []
    first_tokens: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    rows: list[list[int]] = []
    ordered: list[tuple[list[int], int]] = []
    """The rows so far in lexical order, with their numbers."""
    for start, end in pairwise(accumulate(sizes, initial=0)):
        row = ids[start:end]
        place = bisect_left(ordered, (row, 0))
        near = ordered[max(0, place - 1) : place + 1]
        shared, closest = max(((common_length(other, row), -number) for other, number in near), default=(0, 0))
        free, new = len(first_tokens), len(row) - shared
        nodes = [*(rows[-closest][:shared] if shared else ()), *range(free, free + new)]
        if new:
            parents += [nodes[shared - 1] if shared else -1, *range(free, free + new - 1)]
            first_tokens += range(start + shared, end)
            depths += range(shared, len(row))
        insort(ordered, (row, len(rows)))
        rows.append(nodes)
        node_by_token += nodes
    device = ids_T.device
    first_U, depth_U, node_T = (torch.tensor(values, device=device) for values in (first_tokens, depths, node_by_token))
    if one_kernel:
        from trainer.policy.flex_forest import arrange_in_pre_order

        pre_order = arrange_in_pre_order(parents, depth_U)
        return PrefixForest(ids_T[first_U], depth_U, node_T, pre_order.place_U, pre_order=pre_order)
    blocks, outputs = _arrange_blocks(list(_group_rows(rows)), len(first_tokens))
    output_U = torch.tensor(outputs, device=device)
    return PrefixForest(ids_T[first_U], depth_U, node_T, output_U, tuple(blocks))


def _group_rows(rows: Sequence[Sequence[int]]) -> Iterator[_BlockBuilder]:
    """Puts neighbours into one block as long as attention over it costs no more than over each alone."""
    block = _BlockBuilder([], [])
    for row in rows:
        new = sum(node not in block.index_of for node in row)
        together = len(block.nodes) + new
        if block.nodes and (together > MAX_BLOCK_NODES or together**2 > len(block.nodes) ** 2 + len(row) ** 2):
            yield block
            block = _BlockBuilder([], [])
        block.add(row)
    yield block


def _arrange_blocks(blocks: Sequence[_BlockBuilder], nodes: int) -> tuple[list[AttentionBlocks], list[int]]:
    """Batches blocks of similar size, and records each node's index in the outputs."""
    order = sorted(range(len(blocks)), key=lambda index: (blocks[index].is_path, -len(blocks[index].nodes)))
    batches: list[list[_BlockBuilder]] = []
    for index in order:
        block = blocks[index]
        largest = batches[-1][0] if batches else None
        is_similar = (
            largest is not None
            and largest.is_path == block.is_path
            and len(block.nodes) >= MIN_SIZE_RATIO * len(largest.nodes)
        )
        if is_similar:
            batches[-1].append(block)
        else:
            batches.append([block])
    outputs, start = [0] * nodes, 0
    for batch in batches:
        size = len(batch[0].nodes)
        for block in batch:
            for index, node in enumerate(block.nodes):
                outputs[node] = start + index
            start += size
    return [_pad_blocks(batch) for batch in batches], outputs


def _pad_blocks(batch: Sequence[_BlockBuilder]) -> AttentionBlocks:
    size = len(batch[0].nodes)
    node_BM = torch.tensor([block.nodes + [0] * (size - len(block.nodes)) for block in batch])
    if batch[0].is_path:
        return AttentionBlocks(node_BM)
    # Padding sees itself.
    numbered = [number_in_pre_order(block.parents + [-1] * (size - len(block.nodes))) for block in batch]
    place_BM, sizes_BM = (torch.tensor([each[index] for each in numbered]) for index in (0, 1))
    return AttentionBlocks(node_BM, torch.stack([place_BM, place_BM + sizes_BM]))


def number_in_pre_order(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Each node's place in pre-order, and how many nodes it and its descendants are; parents stand before children."""
    sizes, free, places, next_root = [1] * len(parents), [0] * len(parents), [0] * len(parents), 0
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    for node, parent in enumerate(parents):
        if parent < 0:
            place, next_root = next_root, next_root + sizes[node]
        else:
            place = free[parent]
            free[parent] += sizes[node]
        places[node], free[node] = place, place + 1
    return places, sizes


ATTENTION_NAME = "forest"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What layers give to their attention that changes its result, and that is not computed here."""


def register_attention() -> None:
    """Registers forest attention with transformers by name, which a model's own layers look up. Compiled layers leave
    it out: it has its own kernel."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(forest_attention))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def forest_attention(
    _: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends all nodes. Has the signature of transformers: one row, whose tokens are the nodes."""
    if unsupported := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise NotImplementedError(f"its attention has `{unsupported[0]}`")
    forest: PrefixForest = kwargs["forest"]
    inputs = [tensor[0].transpose(0, 1).flatten(1) for tensor in (query, key, value)]
    heads = [tensor.shape[1] for tensor in (query, key, value)]
    if forest.context:
        inputs, heads = forest.context.exchange_heads(inputs, heads, len(forest.output_U))
    scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    if forest.pre_order is None:
        output_NX = _attend_blocks(inputs, heads, forest.blocks, scale, window)
    else:
        output_NX = forest.pre_order.attend(inputs, heads, scale, window)
    output_UX = embedding(forest.output_U, output_NX)
    if forest.context:
        output_UX = forest.context.exchange_nodes(output_UX)
    return output_UX.view(1, len(output_UX), query.shape[1], -1), None


def _attend_blocks(
    inputs: Sequence[Tensor],
    heads: Sequence[int],
    batches: Sequence[AttentionBlocks],
    scale: float | None,
    window: int | None,
) -> Tensor:
    outputs = []
    for blocks in batches:
        gathered = (_gather_blocks(input_UX, blocks, count) for input_UX, count in zip(inputs, heads, strict=True))
        mask = blocks.mask(window)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": heads[0] != heads[1]}
        output = scaled_dot_product_attention(*gathered, scale=scale, **options)  # type: ignore[misc, arg-type]
        outputs.append(output.transpose(1, 2).flatten(0, 1).flatten(1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _gather_blocks(input_UX: Tensor, blocks: AttentionBlocks, heads: int) -> Tensor:
    """Axes: block, head, position, width. Uses `embedding`, whose gradient is much faster than that of an index."""
    gathered_BMX = embedding(blocks.node_BM, input_UX)
    return gathered_BMX.view(*blocks.node_BM.shape, heads, -1).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """Makes transformers build no mask: the blocks have their own."""

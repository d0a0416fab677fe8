"""Attention over a whole forest in one kernel (FlexAttention): on GPUs, in place of a gathered block for each shape.

The nodes are numbered in pre-order, in which a node's descendants follow it without a gap, so that one number tells
what it is seen by. For `q q a` and `q q b b`:

    node               0 1 2 3 4       q q a b b
    end_L              5 5 3 5 5       key k is seen by query q if and only if k <= q < end[k]

The kernel is compiled once for each length of a ladder, whatever the forests are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import embedding

from trainer.algorithms.packing import move_tensor
from trainer.policy.prefix_forest import number_in_pre_order

BLOCK = 128
"""Nodes of a block of the mask: blocks that nothing is seen in are skipped, those that all is seen in have no mask."""
SHORTEST = 1024


@dataclass(frozen=True, slots=True)
class PreOrder:
    """The nodes in pre-order, padded to a length of the ladder; padding sees itself."""

    node_L: Tensor
    """The node at each place; 0 for padding."""
    place_U: Tensor
    """Each node's place."""
    end_L: Tensor
    """The place after a node's last descendant."""
    depth_L: Tensor
    """The position in the row, by which sliding windows are measured."""
    masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """By sliding window: layers share them."""

    def to(self, device: torch.device) -> PreOrder:
        tensors = (self.node_L, self.place_U, self.end_L, self.depth_L)
        node_L, place_U, end_L, depth_L = (move_tensor(each, device) for each in tensors)
        return PreOrder(node_L, place_U, end_L, depth_L)

    def attend(self, inputs: Sequence[Tensor], heads: Sequence[int], scale: float | None, window: int | None) -> Tensor:
        """Attention at all places. The inputs' axes are node and width, the output's place and width."""
        if window not in self.masks:
            self.masks[window] = self.make_mask(window)
        placed = (
            embedding(self.node_L, input_UX).view(len(self.node_L), count, -1).transpose(0, 1)[None]
            for input_UX, count in zip(inputs, heads, strict=True)
        )
        options = {"block_mask": self.masks[window], "scale": scale, "enable_gqa": heads[0] != heads[1]}
        kernel = _kernel(inputs[0].device.type, len(self.node_L), window, torch.is_grad_enabled())
        output: Tensor = kernel(*placed, **options)
        return output[0].transpose(0, 1).flatten(1)

    def make_mask(self, window: int | None = None) -> BlockMask:
        """The mask for a model's layers, with a sliding window if they have one."""
        end_L, depth_L, length = self.end_L, self.depth_L, len(self.end_L)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (key <= query) & (query < end_L[key])
            return seen if window is None else seen & (depth_L[query] - depth_L[key] < window)

        end_KB = end_L.view(-1, BLOCK)
        first_Q = torch.arange(0, length, BLOCK, device=end_L.device)
        earlier_QK = first_Q[:, None] > first_Q[None, :]
        some_QK = (earlier_QK & (end_KB.amax(1)[None, :] > first_Q[:, None])) | torch.eye(
            len(first_Q), dtype=torch.bool, device=end_L.device
        )
        whole_QK = earlier_QK & (end_KB.amin(1)[None, :] >= first_Q[:, None] + BLOCK)
        if window is not None:
            whole_QK = torch.zeros_like(whole_QK)
        part, whole = _list_blocks(some_QK & ~whole_QK), _list_blocks(whole_QK)
        return BlockMask.from_kv_blocks(*part, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _list_blocks(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which: these first, in ascending order."""
    count_Q = chosen_QK.sum(1, dtype=torch.int32)
    index_QK = chosen_QK.int().argsort(dim=1, descending=True, stable=True).int()
    return count_Q[None, None].contiguous(), index_QK[None, None].contiguous()


def arrange_in_pre_order(parents: Sequence[int], depth_U: Tensor) -> PreOrder:
    """The nodes so that descendants follow without a gap; a parent stands before its children in `parents`."""
    device = depth_U.device
    place_U, size_U = (torch.tensor(values, device=device) for values in number_in_pre_order(parents))
    length = ladder_length(len(parents))
    node_L = torch.zeros(length, dtype=torch.long, device=device)
    node_L[place_U] = torch.arange(len(parents), device=device)
    end_L = torch.arange(1, length + 1, device=device)
    end_L[place_U] = place_U + size_U
    depth_L = torch.zeros_like(end_L)
    depth_L[place_U] = depth_U
    return PreOrder(node_L, place_U, end_L, depth_L)


def ladder_length(nodes: int) -> int:
    """The least power of two, at least 1,024, with room for them: few lengths, so few kernels."""
    return max(SHORTEST, 1 << (nodes - 1).bit_length())


@cache
def _kernel(kind: str, *key: object) -> Any:
    """Compiled on a GPU. On a CPU, where it can't be differentiated, it is only compared with the blocks.

    torch compiles a function eight times at most, and then runs it without a kernel, which needs a number for each pair
    of nodes: each key has a function of its own, and what is still compiled too often fails.
    """
    if kind != "cuda":
        return flex_attention
    own = FunctionType(_attend.__code__.replace(co_name="_".join(map(str, ("attend", *key)))), globals())
    return torch.compile(own, fullgraph=True, dynamic=False)


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return flex_attention(query, key, value, **options)

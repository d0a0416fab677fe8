"""Context parallelism (Ulysses): ranks share every row, each with an equal slice of a forest's nodes.

All but attention works on single nodes. Around attention, ranks exchange all heads of their nodes for some heads of all
nodes, so that masks and kernels are those of one rank. Each rank then computes the loss of whole rows, whose gradient
goes through its own nodes: summed over ranks, gradients are those of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from trainer.policy.settings import PolicyError


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share rows, and this one's place among them."""

    rank: int
    size: int
    group: Any

    def own_nodes(self, nodes: int) -> Tensor:
        """This rank's slice; the last node again, where the slice is longer than what is left."""
        length = -(-nodes // self.size)
        return torch.arange(self.rank * length, (self.rank + 1) * length).clamp(max=nodes - 1)

    def exchange_heads(
        self, inputs: Sequence[Tensor], heads: Sequence[int], nodes: int
    ) -> tuple[list[Tensor], list[int]]:
        """All nodes of this rank's heads, given its nodes with all heads. Fewer heads than ranks are repeated."""
        parts = []
        for input_NX, count in zip(inputs, heads, strict=True):
            copies = max(1, self.size // count)
            parts.append(input_NX.view(len(input_NX), count, -1).repeat_interleave(copies, 1))
        widths = [part.shape[1] * part.shape[2] // self.size for part in parts]
        sent_RNX = torch.cat([part.reshape(len(part), self.size, -1) for part in parts], -1).transpose(0, 1)
        received_UX = exchange(sent_RNX, self.group).flatten(0, 1)[:nodes]
        return list(torch.split(received_UX, widths, -1)), [max(1, count // self.size) for count in heads]

    def exchange_nodes(self, output_UX: Tensor) -> Tensor:
        """The reverse: all heads of this rank's nodes."""
        length = -(-len(output_UX) // self.size)
        padded_UX = pad(output_UX, (0, 0, 0, length * self.size - len(output_UX)))
        return exchange(padded_UX.view(self.size, length, -1), self.group).transpose(0, 1).flatten(1)

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks, each of which has values of its own nodes and 0 elsewhere."""
        result: Tensor = _Sum.apply(values, self.group)  # type: ignore[no-untyped-call]
        return result

    def gather(self, values_N: Tensor) -> Tensor:
        """The values of all nodes, given those of this rank's."""
        return self.add(pad(values_N, (self.rank * len(values_N), (self.size - 1 - self.rank) * len(values_N))))


def require_divisible_heads(config: Any, size: int, tensor: int) -> None:
    """Raises PolicyError for a model whose heads cannot be divided among ranks."""
    heads = config.num_attention_heads
    kv_heads = (getattr(config, "num_key_value_heads", None) or heads) // tensor
    if heads % (size * tensor) or (kv_heads % size and size % kv_heads):
        by = f"`distributed.context_parallel: {size}`" + (f" times `tensor_parallel: {tensor}`" if tensor > 1 else "")
        problem = f"{by} does not divide the model's {heads} attention heads, or {kv_heads * tensor} of keys and values"
        raise PolicyError(problem, "set a divisor of them, or `distributed.context_parallel: 1`")


def exchange(
    values: Tensor, group: Any, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """Sends each rank of a group a part of the first axis, and takes what they send; parts are equally long if no
    lengths are given. Gradients go the other way."""
    result: Tensor = _Exchange.apply(values, group, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any, sent: list[int] | None, received: list[int] | None) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        length = len(values) if received is None else sum(received)
        result = values.new_empty(length, *values.shape[1:])
        dist.all_to_all_single(result, values.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """All ranks have the same gradient, and each takes that of its own nodes."""
        return gradient, None

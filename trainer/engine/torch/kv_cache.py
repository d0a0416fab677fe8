"""The KV cache of running sequences, the cache of shared prefixes, and the interface of a model that uses them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.ledger import common_length
from trainer.vision.image_processor import PreparedPrompt

PAGE_SIZE = 64
"""Positions per attention product; a fixed shape rounds the same however long other sequences are."""
POSITION_AXIS = 3
"""The axis of positions in a copy of one slot's keys and values: layer, key or value, head, position, size."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of the keys and values of one token."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of the running sequences, in one tensor with a slot for each, so that a step copies nothing.

    Axes: layer, key or value, slot, head, position, size. It grows with the longest sequence.
    """

    def __init__(self, shape: KVShape, slots: int) -> None:
        self._shape = shape
        self._slots = slots
        self.values = self._allocate(0)

    def clear(self) -> None:
        """Frees the memory."""
        self.values = self._allocate(0)

    @property
    def length(self) -> int:
        """Positions in each slot."""
        return self.values.shape[4]

    @staticmethod
    def planned_length(length: int) -> int:
        """The positions that a cache has once a sequence has grown to a length from within its first page."""
        return PAGE_SIZE << max(0, (length - 1) // PAGE_SIZE).bit_length()

    def ensure_length(self, length: int, used: int) -> None:
        """Grows to at least this many positions, keeping the first `used` slots; doubling keeps copies rare."""
        if length <= self.length:
            return
        grown = self._allocate(max(2 * self.length, -(-length // PAGE_SIZE) * PAGE_SIZE))
        grown[:, :, :used, :, : self.length] = self.values[:, :, :used]
        self.values = grown

    def reserve(self, lengths: Mapping[int, int], used: int) -> None:
        """Makes room for this many positions in each slot."""
        self.ensure_length(max(lengths.values()), used)

    def free(self, slot: int, last: int, length: int) -> None:
        """Frees a slot: the last one in use, with its first `length` positions, moves there."""
        if slot != last:
            self.move(last, slot, length)

    def free_all(self) -> None:
        """Frees all slots."""

    def places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where positions of slots are: the indices in the axes of slots and positions."""
        return slots, positions

    def selector(self, slots: slice, length: int) -> Callable[[Tensor], Tensor]:
        """A function that takes the first positions of some slots from a layer's values."""
        return lambda kv_layer: kv_layer[:, slots, :, :length]

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of a slot's values from `start` to `end`."""
        return self.values[:, :, slot, :, start:end].clone()

    def write(self, slot: int, start: int, values: Tensor) -> None:
        """Writes values into a slot from position `start` on."""
        self.values[:, :, slot, :, start : start + values.shape[3]] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another."""
        self.values[:, :, target, :, :length] = self.values[:, :, source, :, :length]

    def _allocate(self, length: int) -> Tensor:
        """Zeros: masked positions must be finite, since zero times infinity is not zero.

        On a CPU, NumPy's zeros take memory only near what is written, so that most of the free slots have none.
        """
        shape = self._shape
        axes = (shape.layers, 2, self._slots, shape.heads, length, shape.head_dim)
        if shape.device.type != "cpu" or length == 0:
            return torch.zeros(axes, dtype=shape.dtype, device=shape.device)
        size = shape.bytes_per_token * self._slots * length
        return torch.from_numpy(np.zeros(size, np.uint8)).view(shape.dtype).view(axes)


@dataclass(eq=False, slots=True)
class Node:
    """A node of the prefix tree: ids that follow its parent's, with their keys and values."""

    ids: tuple[int, ...]
    values: Tensor
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)


class PrefixCache:
    """A radix tree of token ids with their keys and values; evicts the least recently used leaf.

    Readers get copies, so that eviction never affects a running sequence. A tree is valid for one version of the
    weights.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._roots: dict[int, Node] = {}
        self._used: OrderedDict[Node, None] = OrderedDict()
        """Least recently used first. Using a node also uses its parent, after it: so the first is always a leaf."""
        self.tokens = 0

    def match(self, ids: Sequence[int]) -> int:
        """The length of the longest cached prefix."""
        return sum(count for _, count in self._find_path(tuple(ids)))

    def read(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The values of the longest cached prefix, node by node."""
        path = list(self._find_path(tuple(ids)))
        self._mark_used(path)
        for node, count in path:
            yield node.values[:, :, :, :count]

    def insert(self, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Caches `ids`; `read(start, end)` returns the values of those that are new."""
        ids = tuple(ids)
        path = list(self._find_path(ids))
        cached = sum(count for _, count in path)
        if path and path[-1][1] < len(path[-1][0].ids):
            path[-1] = (self._split(*path[-1]), path[-1][1])
        if cached < len(ids) <= self._max_tokens:
            parent = path[-1][0] if path else None
            node = Node(ids[cached:], read(cached, len(ids)), parent)
            self._children(parent)[node.ids[0]] = node
            self.tokens += len(node.ids)
            path.append((node, len(node.ids)))
        self._mark_used(path)
        while self.tokens > self._max_tokens:
            oldest, _ = self._used.popitem(last=False)
            del self._children(oldest.parent)[oldest.ids[0]]
            self.tokens -= len(oldest.ids)

    def _find_path(self, ids: tuple[int, ...]) -> Iterator[tuple[Node, int]]:
        """The nodes along `ids`, each with the number of ids that match; only the last may match in part."""
        position, children = 0, self._roots
        while position < len(ids) and (node := children.get(ids[position])):
            piece = ids[position : position + len(node.ids)]
            if piece != node.ids:
                yield node, common_length(node.ids, piece)
                return
            yield node, len(piece)
            position, children = position + len(piece), node.children

    def _split(self, node: Node, count: int) -> Node:
        """Splits a node by copying both halves: a view would keep the whole tensor alive after one half is evicted."""
        upper = Node(node.ids[:count], node.values[:, :, :, :count].clone(), node.parent, {node.ids[count]: node})
        self._children(node.parent)[upper.ids[0]] = upper
        node.ids, node.values, node.parent = node.ids[count:], node.values[:, :, :, count:].clone(), upper
        return upper

    def _mark_used(self, path: Sequence[tuple[Node, int]]) -> None:
        for node, _ in reversed(path):
            self._used[node] = None
            self._used.move_to_end(node)

    def _children(self, parent: Node | None) -> dict[int, Node]:
        return parent.children if parent else self._roots


class Chunk(NamedTuple):
    """Ids of one sequence to compute in a step, and the range of their positions."""

    slot: int
    start: int
    end: int
    ids: Sequence[int]
    prepared: PreparedPrompt | None = None
    """The prompt's images, if it has any."""


class ModelRunner(Protocol):
    """A model as the engine runs it."""

    shape: KVShape
    is_exact: bool
    """Whether its logprobs are the trainer's for the same weights, up to rounding of float32."""
    context_length: int
    vocab_size: int
    notes: tuple[str, ...]
    """What an operator should know about how this model runs."""

    def __call__(self, chunks: Sequence[Chunk], kv_cache: KVCache) -> Tensor:
        """Writes the keys and values of each chunk into its slot; returns the logits after each chunk's last id."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Loads new weights by the model's own names, all or none."""
        ...

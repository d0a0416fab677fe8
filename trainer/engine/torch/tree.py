"""What was computed once for a prefix is kept in a tree over token ids, and the least recently used leaf goes first.

A reader takes a copy, so that nothing in use can be evicted under it. A tree belongs to one version of the weights:
whoever publishes others begins a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

POSITIONS = 3
"""The axis of a node's values that runs over its ids: layer, key or value, head, position, size."""


@dataclass(eq=False, slots=True)
class Node:
    """Some ids after its parent's, with their keys and values."""

    ids: tuple[int, ...]
    values: Tensor
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)


class Tree:
    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._roots: dict[int, Node] = {}
        self._used: OrderedDict[Node, None] = OrderedDict()
        """Least recently used first. A parent is used whenever its child is, and after it: so the first is a leaf."""
        self.tokens = 0

    def match(self, ids: Sequence[int]) -> int:
        """How many of these ids, from the first, are at hand."""
        return sum(count for _, count in self._path(tuple(ids)))

    def read(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The values of the longest known prefix, piece by piece."""
        path = list(self._path(tuple(ids)))
        self._use(path)
        for node, count in path:
            yield node.values[:, :, :, :count]

    def insert(self, ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Keeps `ids`; `read(start, end)` gives the values of those that are new."""
        ids = tuple(ids)
        path = list(self._path(ids))
        known = sum(count for _, count in path)
        if path and path[-1][1] < len(path[-1][0].ids):
            path[-1] = (self._split(*path[-1]), path[-1][1])
        if known < len(ids) <= self._budget:
            parent = path[-1][0] if path else None
            node = Node(ids[known:], read(known, len(ids)), parent)
            self._children(parent)[node.ids[0]] = node
            self.tokens += len(node.ids)
            path.append((node, len(node.ids)))
        self._use(path)
        while self.tokens > self._budget:
            self._evict()

    def _path(self, ids: tuple[int, ...]) -> Iterator[tuple[Node, int]]:
        """The nodes that begin `ids`, each with how many of its ids agree; only the last may agree in part."""
        at, children = 0, self._roots
        while at < len(ids) and (node := children.get(ids[at])):
            some = ids[at : at + len(node.ids)]
            if some != node.ids:
                yield node, common(node.ids, some)
                return
            yield node, len(some)
            at, children = at + len(some), node.children

    def _split(self, node: Node, count: int) -> Node:
        """Copies both halves: a view would keep the whole alive after one half is evicted."""
        upper = Node(node.ids[:count], node.values[:, :, :, :count].clone(), node.parent, {node.ids[count]: node})
        self._children(node.parent)[upper.ids[0]] = upper
        node.ids, node.values, node.parent = node.ids[count:], node.values[:, :, :, count:].clone(), upper
        return upper

    def _use(self, path: Sequence[tuple[Node, int]]) -> None:
        for node, _ in reversed(path):
            self._used[node] = None
            self._used.move_to_end(node)

    def _evict(self) -> None:
        node, _ = self._used.popitem(last=False)
        del self._children(node.parent)[node.ids[0]]
        self.tokens -= len(node.ids)

    def _children(self, parent: Node | None) -> dict[int, Node]:
        return parent.children if parent else self._roots


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many ids two sequences begin with alike. By halves: comparing slices is quick, and ids one by one is not."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low

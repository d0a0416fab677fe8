"""Keys and values of the running rows lie in one tensor, a slot for each, so that a step reads them without a copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 64
"""Positions that attention takes at a time. A fixed shape gives the same rounding however long the other rows are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one position needs."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.layers * 2 * self.heads * self.size * self.dtype.itemsize


class Slab:
    """Axes: layer, key or value, slot, head, position, size. It grows with the longest row."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self._shape = shape
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        self.values = self._empty(0)

    @property
    def length(self) -> int:
        return self.values.shape[4]

    def reach(self, length: int) -> None:
        """Makes room for rows of this length; doubling keeps the copying rare."""
        if length <= self.length:
            return
        grown = self._empty(max(2 * self.length, -(-length // PAGE) * PAGE))
        grown[:, :, :, :, : self.length] = self.values
        self.values = grown

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """A copy, which outlives the slot."""
        return self.values[:, :, slot, :, start:end].clone()

    def write(self, slot: int, start: int, values: Tensor) -> None:
        self.values[:, :, slot, :, start : start + values.shape[3]] = values

    def move(self, source: int, target: int, length: int) -> None:
        self.values[:, :, target, :, :length] = self.values[:, :, source, :, :length]

    def _empty(self, length: int) -> Tensor:
        """Zeros: what is masked out must still be finite, since nothing times infinity is not nothing."""
        shape = self._shape
        return torch.zeros(
            (shape.layers, 2, self._slots, shape.heads, length, shape.size), dtype=shape.dtype, device=shape.device
        )

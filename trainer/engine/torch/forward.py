"""A step of a model: each row hands in the ids that it owes the slab, and gets the logits after the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from trainer.engine.torch.slab import Shape, Slab
from trainer.vision.eyes import Sight


class Piece(NamedTuple):
    """Ids of one row whose keys and values are not yet in its slot, and the positions that they take."""

    slot: int
    start: int
    end: int
    ids: Sequence[int]
    sight: Sight | None = None
    """Of a row with pictures."""


class Forward(Protocol):
    """A model as the engine runs it."""

    shape: Shape
    context: int
    vocabulary: int
    notes: tuple[str, ...]
    """What an operator should know about how this model runs."""

    def __call__(self, pieces: Sequence[Piece], slab: Slab) -> Tensor:
        """Writes each piece's keys and values into its slot; a row of logits for each piece."""
        ...

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """New weights by the model's own names, all or nothing."""
        ...

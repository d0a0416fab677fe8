"""The trainer's side of the weights that servers are given, and held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gateway.types import Image
from trainer.vision.eyes import Eyes

Finds = Callable[[Sequence[int], Sequence[Image]], Sequence[float]]
"""Of ids, and the images that stand among them: how likely the trainer's model finds each id but the first, given those
before it; logprobs at temperature 1."""
Filed = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Names weights as a checkpoint's files do, which is how servers read them."""


@dataclass(frozen=True, slots=True)
class Own:
    """As it is, where nobody trains."""

    finds: Finds | None = None
    filed: Filed = dict
    eyes: Eyes | None = None


NOTHING = Own()

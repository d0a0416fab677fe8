"""How much a token weighs in a step is said once, for the whole step, however it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.learn.batch import Batch
from trainer.learn.settings import Aggregation


@dataclass(frozen=True, slots=True)
class Totals:
    """What a step divides by. Made of all its micro-batches before the first is learned from."""

    weight: float
    """Of all trained tokens together."""
    sequences: int
    """Those that have a trained token."""

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Totals:
        weight, sequences = 0.0, 0
        for batch in batches:
            weight += float(batch.weights_T.double().sum())
            sequences += int((batch.total_S(batch.weights_T) > 0).sum())
        if not sequences:
            raise ValueError("nothing in these batches is trained: no token of the policy has a weight")
        return cls(weight, sequences)


def aggregate(losses_T: Tensor, batch: Batch, kind: Aggregation, totals: Totals, length: int = 1) -> Tensor:
    """This micro-batch's part of the step's loss; the parts of all micro-batches add up to it."""
    weighted_T = torch.where(batch.trained_T, batch.weights_T * losses_T, 0)
    if kind == "token":
        return weighted_T.sum() / totals.weight
    if kind == "constant":
        return weighted_T.sum() / (totals.sequences * length)
    weight_S = batch.total_S(batch.weights_T)
    mean_S = batch.total_S(weighted_T) / torch.where(weight_S > 0, weight_S, 1)
    return mean_S.sum() / totals.sequences

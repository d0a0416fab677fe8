"""Sums token losses into the loss of a step, independently of how the step is split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.packing import Batch
from trainer.algorithms.settings import Aggregation


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a step's loss is divided by, computed over all its micro-batches before the first backward pass."""

    weight: float
    """The weights of all trained tokens together."""
    sequences: int
    """How many sequences have a trained token."""

    @classmethod
    def from_batches(cls, batches: Iterable[Batch]) -> StepTotals:
        weight, sequences = 0.0, 0
        for batch in batches:
            weight += float(batch.weights_T.double().sum())
            sequences += int((batch.sum_by_sequence(batch.weights_T) > 0).sum())
        if not sequences:
            raise ValueError("nothing in these batches is trained: no token of the policy has a weight")
        return cls(weight, sequences)


def aggregate_loss(losses_T: Tensor, batch: Batch, kind: Aggregation, totals: StepTotals, length: int = 1) -> Tensor:
    """Computes this micro-batch's part of the step's loss; the parts of all micro-batches add up to it."""
    weighted_T = torch.where(batch.trained_T, batch.weights_T * losses_T, 0)
    if kind == "token":
        return weighted_T.sum() / totals.weight
    if kind == "constant":
        return weighted_T.sum() / (totals.sequences * length)
    weight_S = batch.sum_by_sequence(batch.weights_T)
    mean_S = batch.sum_by_sequence(weighted_T) / torch.where(weight_S > 0, weight_S, 1)
    return mean_S.sum() / totals.sequences

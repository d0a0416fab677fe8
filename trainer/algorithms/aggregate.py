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
    rollouts: int
    """How many rollouts have a trained token. One of several ledgers counts once, however its tokens are split."""

    @classmethod
    def from_batches(cls, batches: Iterable[Batch]) -> StepTotals:
        """The totals of batches whose sequences are rollouts of one ledger each."""
        weight, rollouts = 0.0, 0
        for batch in batches:
            weight += float(batch.weights_T.double().sum())
            rollouts += int((batch.sum_by_sequence(batch.weights_T) > 0).sum())
        if not rollouts:
            raise ValueError("nothing in these batches is trained: no token of the policy has a weight")
        return cls(weight, rollouts)


def aggregate_loss(losses_T: Tensor, batch: Batch, kind: Aggregation, totals: StepTotals, length: int = 1) -> Tensor:
    """Computes this micro-batch's part of the step's loss; the parts of all micro-batches add up to it."""
    weighted_T = torch.where(batch.trained_T, batch.weights_T * losses_T, 0)
    if kind == "token":
        return weighted_T.sum() / totals.weight
    if kind == "constant":
        return weighted_T.sum() / (totals.rollouts * length)
    weight_S = batch.sum_by_sequence(batch.weights_T) if batch.rollout_weight_S is None else batch.rollout_weight_S
    mean_S = batch.sum_by_sequence(weighted_T) / torch.where(weight_S > 0, weight_S, 1)
    return mean_S.sum() / totals.rollouts

"""GSPO: what was rewarded is a sequence, so that its ratio, too, is the sequence's: the mean over its tokens."""

from __future__ import annotations

from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip, Objective, clipped, log_ratio
from trainer.learn.algorithms.grpo import advantages
from trainer.learn.batch import Batch


def objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Each token carries the sequence's ratio with its own gradient, so that turns may differ in their advantage."""
    log_T = log_ratio(logprobs_T, batch)
    mean_T = batch.mean_S(log_T.detach(), batch.trained_T)[batch.sequence_T]
    return clipped((mean_T + log_T - log_T.detach()).exp(), batch, clip)


GSPO = Algorithm("gspo", advantages, objective, Clip(3e-4, 4e-4), aggregate="sequence")

"""GSPO: one importance ratio per sequence, the geometric mean over its tokens."""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip, Objective, clip_objective, compute_log_ratio
from trainer.algorithms.grpo import compute_advantages
from trainer.algorithms.packing import Batch


def compute_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Gives each token the sequence's ratio with its own gradient, so that turns may differ in their advantage."""
    log_T = compute_log_ratio(logprobs_T, batch)
    mean_T = batch.mean_by_sequence(log_T.detach(), batch.trained_T)[batch.sequence_T]
    return clip_objective((mean_T + log_T - log_T.detach()).exp(), batch, clip)


GSPO = Algorithm("gspo", compute_advantages, compute_objective, Clip(3e-4, 4e-4), aggregate="sequence")

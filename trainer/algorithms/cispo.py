"""CISPO: the clipped ratio is a constant weight of the policy gradient, so that no token loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip, Objective, compute_log_ratio
from trainer.algorithms.grpo import compute_advantages
from trainer.algorithms.packing import Batch


def compute_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the policy gradient weighted by the detached, clipped ratio."""
    ratio_T = compute_log_ratio(logprobs_T, batch).detach().exp()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    trained_logprobs_T = torch.where(batch.trained_T, logprobs_T, 0)
    losses_T = torch.where(batch.trained_T, -weight_T * batch.advantages_T * trained_logprobs_T, 0)
    return Objective(losses_T, batch.trained_T & (weight_T != ratio_T))


CISPO = Algorithm("cispo", compute_advantages, compute_objective, Clip(1.0, 4.0), aggregate="token")

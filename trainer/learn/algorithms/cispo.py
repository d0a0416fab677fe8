"""CISPO: the ratio is a weight and bounded as such, and no token loses its gradient to a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip, Objective, log_ratio
from trainer.learn.algorithms.grpo import advantages
from trainer.learn.batch import Batch


def objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    ratio_T = log_ratio(logprobs_T, batch).detach().exp()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    likelihood_T = torch.where(batch.trained_T, logprobs_T, 0)
    losses_T = torch.where(batch.trained_T, -weight_T * batch.advantages_T * likelihood_T, 0)
    return Objective(losses_T, batch.trained_T & (weight_T != ratio_T))


CISPO = Algorithm("cispo", advantages, objective, Clip(1.0, 4.0), aggregate="token")

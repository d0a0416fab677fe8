"""The distance to the reference is told from sampled tokens; what an estimator is worth and where it pulls differ.

With d = log ref - log new, of a token that the new policy sampled:

    k1    -d             right on average, may be negative; as a loss it pulls nowhere on average
    k2    d^2 / 2        slightly off, but its gradient is that of the true distance
    k3    e^d - 1 - d    right on average, never negative; its gradient is that of the distance the other way round
    k1+   k3+            their value with k2's gradient
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learn.algorithms.base import FAR
from trainer.learn.batch import Batch
from trainer.learn.settings import Estimator


def distance(logprobs_T: Tensor, batch: Batch, estimator: Estimator) -> Tensor:
    """Of each trained token; 0 elsewhere."""
    if batch.ref_T is None:
        raise ValueError("a KL term needs the reference policy's logprobs, and the batch has none")
    log_T = torch.where(batch.trained_T, batch.ref_T - logprobs_T, 0).clamp(-FAR, FAR)
    if estimator == "k2":
        return log_T**2 / 2
    value_T = -log_T if estimator.startswith("k1") else log_T.exp() - 1 - log_T
    if not estimator.endswith("+"):
        return value_T
    pull_T = log_T**2 / 2
    return value_T.detach() + pull_T - pull_T.detach()

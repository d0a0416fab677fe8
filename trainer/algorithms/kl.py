"""Estimators of the KL divergence to the reference policy, from sampled tokens.

With d = log ref - log new, of a token that the new policy sampled:

    k1    -d             unbiased, may be negative; as a loss, its gradient is 0 on average
    k2    d^2 / 2        slightly biased, but its gradient is that of the true KL
    k3    e^d - 1 - d    unbiased, never negative; its gradient is that of the reverse KL
    k1+   k3+            the value of k1 or k3 with the gradient of k2
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.base import MAX_LOG_RATIO
from trainer.algorithms.packing import Batch
from trainer.algorithms.settings import Estimator


def estimate_kl(logprobs_T: Tensor, batch: Batch, estimator: Estimator) -> Tensor:
    """Estimates the KL of each trained token; 0 elsewhere."""
    if batch.ref_logprobs_T is None:
        raise ValueError("a KL term needs the reference policy's logprobs, and the batch has none")
    log_T = torch.where(batch.trained_T, batch.ref_logprobs_T - logprobs_T, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k2":
        return log_T**2 / 2
    value_T = -log_T if estimator.startswith("k1") else log_T.exp() - 1 - log_T
    if not estimator.endswith("+"):
        return value_T
    gradient_T = log_T**2 / 2
    return value_T.detach() + gradient_T - gradient_T.detach()

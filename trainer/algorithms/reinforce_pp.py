"""REINFORCE++, with and without a group baseline: advantages are normalised over the whole step, not over the group."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip
from trainer.algorithms.grpo import EPSILON, center_rewards, compute_objective


def compute_advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Returns the rewards unchanged: they are whitened once each token has its own."""
    return rewards_S.clone()


def whiten(advantages_T: Tensor, trained_T: Tensor) -> Tensor:
    """Normalises all trained tokens of a step to mean 0 and standard deviation 1; 0 if all values are equal."""
    trained = advantages_T[trained_T].sort().values  # Sorted, so that rounding does not depend on the order.
    if len(trained) < 2 or bool(trained.max() == trained.min()):
        return torch.zeros_like(advantages_T)
    return torch.where(trained_T, (advantages_T - trained.mean()) / (trained.std() + EPSILON), 0)


REINFORCE_PP = Algorithm(
    "reinforce_pp", compute_advantages, compute_objective, Clip(0.2, 0.2), aggregate="token", whiten=True
)


def compute_baseline_advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Subtracts the group's mean, and divides by the standard deviation over the whole step."""
    centered_S = center_rewards(rewards_S, group_S)
    if len(centered_S) < 2:
        return centered_S
    deviation = centered_S.sort().values.std()  # Sorted, so that rounding does not depend on the order.
    return centered_S / (deviation + EPSILON)


REINFORCE_PP_BASELINE = Algorithm(
    "reinforce_pp_baseline", compute_baseline_advantages, compute_objective, Clip(0.2, 0.2), aggregate="sequence"
)

"""REINFORCE++: the whole batch is the baseline, so that one rollout of each task is enough."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip
from trainer.learn.algorithms.grpo import EPSILON, objective


def advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """The rewards as they are: they are whitened once each token has its own."""
    return rewards_S.clone()


def whitened(advantages_T: Tensor, trained_T: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over all trained tokens of a step; 0 where there is but one value."""
    kept = advantages_T[trained_T].sort().values  # Sums round by their order, and this one has none.
    if len(kept) < 2 or bool(kept.max() == kept.min()):
        return torch.zeros_like(advantages_T)
    return torch.where(trained_T, (advantages_T - kept.mean()) / (kept.std() + EPSILON), 0)


REINFORCE_PP = Algorithm("reinforce_pp", advantages, objective, Clip(0.2, 0.2), aggregate="token", whiten=True)

"""RLOO: the baseline of a rollout is the mean reward of the other rollouts of its group."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip, Objective, compute_log_ratio
from trainer.algorithms.grpo import center_rewards
from trainer.algorithms.packing import Batch, count_by_segment, number_segments


def compute_advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Computes r - mean of the others, which is (r - mean of all) * n / (n - 1)."""
    index_S, groups = number_segments(group_S)
    sizes_S = count_by_segment(index_S, groups)[index_S]
    return center_rewards(rewards_S, group_S) * sizes_S / (sizes_S - 1).clamp(min=1)


def compute_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the plain policy gradient. The unclipped ratio corrects for optimizer steps after the first."""
    losses_T = torch.where(batch.trained_T, -compute_log_ratio(logprobs_T, batch).exp() * batch.advantages_T, 0)
    return Objective(losses_T, torch.zeros_like(batch.trained_T))


RLOO = Algorithm("rloo", compute_advantages, compute_objective, Clip(0.2, 0.2), aggregate="constant")

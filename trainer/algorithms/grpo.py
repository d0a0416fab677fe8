"""GRPO and Dr.GRPO: rewards minus their group's mean, divided by the group's standard deviation (GRPO only)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip, Objective, clip_objective, compute_log_ratio
from trainer.algorithms.packing import Batch, count_by_segment, number_segments, segment_varies, sum_by_segment

EPSILON = 1e-6
"""Added to standard deviations, so that tiny differences are not blown up."""


def center_rewards(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Subtracts each group's mean; exactly 0 where all rewards of a group are equal."""
    index_S, groups = number_segments(group_S)
    mean_S = (sum_by_segment(rewards_S, index_S, groups) / count_by_segment(index_S, groups))[index_S]
    return torch.where(segment_varies(rewards_S, index_S, groups), rewards_S - mean_S, 0)


def compute_advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Normalises rewards by the mean and standard deviation of their group."""
    index_S, groups = number_segments(group_S)
    centered_S = center_rewards(rewards_S, group_S)
    variance = sum_by_segment(centered_S**2, index_S, groups) / (count_by_segment(index_S, groups) - 1).clamp(min=1)
    return centered_S / (variance.sqrt()[index_S] + EPSILON)


def compute_objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the PPO objective with one ratio per token."""
    return clip_objective(compute_log_ratio(logprobs_T, batch).exp(), batch, clip)


GRPO = Algorithm("grpo", compute_advantages, compute_objective, Clip(0.2, 0.2), aggregate="sequence")


DR_GRPO = Algorithm("dr_grpo", center_rewards, compute_objective, Clip(0.2, 0.2), aggregate="constant")

"""RLOO: a rollout is worth what it gained over the others; a baseline that leaves it out is free of its own luck."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip, Objective, log_ratio
from trainer.learn.algorithms.grpo import centred
from trainer.learn.batch import Batch
from trainer.learn.segments import count, numbered


def advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """r - mean of the others, which is (r - mean of all) * n / (n - 1)."""
    cell_S, cells = numbered(group_S)
    sizes_S = count(cell_S, cells)[cell_S]
    return centred(rewards_S, group_S) * sizes_S / (sizes_S - 1).clamp(min=1)


def objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """The plain policy gradient; the ratio carries it over to steps after the first, and nothing is clipped."""
    losses_T = torch.where(batch.trained_T, -log_ratio(logprobs_T, batch).exp() * batch.advantages_T, 0)
    return Objective(losses_T, torch.zeros_like(batch.trained_T))


RLOO = Algorithm("rloo", advantages, objective, Clip(0.2, 0.2), aggregate="constant")

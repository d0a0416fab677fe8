"""GRPO: a rollout is worth what it gained over its siblings, in units of how much they differ."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip, Objective, clipped, log_ratio
from trainer.learn.batch import Batch
from trainer.learn.segments import count, numbered, total, varied

EPSILON = 1e-6
"""Keeps siblings that hardly differ from being blown up."""


def centred(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    """Rewards less their group's mean; exactly 0 where a group has but one value."""
    cell_S, cells = numbered(group_S)
    mean_S = (total(rewards_S, cell_S, cells) / count(cell_S, cells))[cell_S]
    return torch.where(varied(rewards_S, cell_S, cells), rewards_S - mean_S, 0)


def advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    cell_S, cells = numbered(group_S)
    centred_S = centred(rewards_S, group_S)
    spread = (total(centred_S**2, cell_S, cells) / (count(cell_S, cells) - 1).clamp(min=1)).sqrt()
    return centred_S / (spread[cell_S] + EPSILON)


def objective(logprobs_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    return clipped(log_ratio(logprobs_T, batch).exp(), batch, clip)


GRPO = Algorithm("grpo", advantages, objective, Clip(0.2, 0.2), aggregate="sequence")

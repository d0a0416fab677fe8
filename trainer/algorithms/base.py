"""What an RL algorithm consists of: group advantages, a clipped objective, and an aggregation of token losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.packing import Batch
from trainer.algorithms.settings import Aggregation

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this: larger ones come from rounding only, and their ratio would overflow."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the importance ratio: from 1 - low to 1 + high."""

    low: float
    high: float
    dual: float | None = None
    """The largest ratio that counts where the advantage is negative (dual clip)."""


class Objective(NamedTuple):
    """Token losses, exactly 0 where nothing is trained, and the tokens at which the clip was active."""

    losses_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named algorithm, with the clip and the aggregation that apply unless settings override them."""

    name: str
    advantages: Callable[[Tensor, Tensor], Tensor]
    """(rewards_S, group_S) -> advantages_S."""
    objective: Callable[[Tensor, Batch, Clip], Objective]
    """(logprobs_T of the new policy, batch, clip) -> the losses to minimise."""
    clip: Clip
    aggregate: Aggregation
    whiten: bool = False
    """Normalises the advantages of all tokens of a step to mean 0 and standard deviation 1."""


def compute_log_ratio(logprobs_T: Tensor, batch: Batch) -> Tensor:
    """Computes the log ratio of the new to the old policy; 0 where nothing is trained."""
    return torch.where(batch.trained_T, logprobs_T - batch.old_logprobs_T, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_objective(ratio_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """Computes the PPO objective: the minimum of the unclipped and the clipped surrogate."""
    unclipped_T = ratio_T * batch.advantages_T
    clipped_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * batch.advantages_T
    surrogate_T = torch.minimum(unclipped_T, clipped_T)
    if clip.dual is not None:
        floor_T = torch.where(batch.advantages_T < 0, clip.dual * batch.advantages_T, -torch.inf)
        surrogate_T = torch.maximum(surrogate_T, floor_T)
    losses_T = torch.where(batch.trained_T, -surrogate_T, 0)
    return Objective(losses_T, batch.trained_T & (surrogate_T != unclipped_T))

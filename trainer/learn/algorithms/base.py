"""An algorithm says what a reward is worth beside its siblings', and what a step away from the old policy may gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.learn.batch import Batch
from trainer.learn.settings import Aggregation

FAR = 20.0
"""Logprobs further apart than this tell of rounding only, and their ratio would overflow in the end."""


@dataclass(frozen=True, slots=True)
class Clip:
    """How far the ratio to the old policy counts: from 1 - low to 1 + high."""

    low: float
    high: float
    dual: float | None = None
    """Where the advantage is below 0, the ratio counts up to this, however far it is."""


class Objective(NamedTuple):
    """Of each token, the loss, exactly 0 where nothing is trained, and whether the clip bound it."""

    losses_T: Tensor
    clipped_T: Tensor


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A name, two functions, and what goes with them unless settings say otherwise."""

    name: str
    advantages: Callable[[Tensor, Tensor], Tensor]
    """(rewards_S, group_S) -> advantages_S."""
    objective: Callable[[Tensor, Batch, Clip], Objective]
    """(logprobs_T of the new policy, batch, clip) -> what to minimise."""
    clip: Clip
    aggregate: Aggregation
    whiten: bool = False
    """Advantages of all tokens of a step are brought to mean 0 and deviation 1 together."""


def log_ratio(logprobs_T: Tensor, batch: Batch) -> Tensor:
    """New against old, 0 where nothing is trained, whatever the logprobs there are."""
    return torch.where(batch.trained_T, logprobs_T - batch.old_T, 0).clamp(-FAR, FAR)


def clipped(ratio_T: Tensor, batch: Batch, clip: Clip) -> Objective:
    """The worse of the ratio and the clipped ratio, so that no step is worth more than the clip allows."""
    free_T = ratio_T * batch.advantages_T
    bound_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * batch.advantages_T
    worth_T = torch.minimum(free_T, bound_T)
    if clip.dual is not None:
        least_T = torch.where(batch.advantages_T < 0, clip.dual * batch.advantages_T, -torch.inf)
        worth_T = torch.maximum(worth_T, least_T)
    losses_T = torch.where(batch.trained_T, -worth_T, 0)
    return Objective(losses_T, batch.trained_T & (worth_T != free_T))

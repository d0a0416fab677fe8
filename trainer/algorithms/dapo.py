"""DAPO: a higher upper clip, a token-level mean, and the penalty for overlong rollouts."""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.base import Algorithm, Clip
from trainer.algorithms.grpo import compute_advantages, compute_objective

DAPO = Algorithm("dapo", compute_advantages, compute_objective, Clip(0.2, 0.28), aggregate="token")


def overlong_penalty(lengths_S: Tensor, limit: int, margin: int) -> Tensor:
    """What length adds to a reward: 0 up to `limit - margin` tokens, then linearly less, and -1 from the limit on."""
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens does not lie within a limit of {limit}")
    return -((lengths_S - (limit - margin)) / margin).clamp(0, 1)

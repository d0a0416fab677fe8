"""DAPO: unlikely tokens get more room to rise, every token counts alike, and groups without a lesson go."""

from __future__ import annotations

from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip
from trainer.learn.algorithms.grpo import advantages, objective

DAPO = Algorithm("dapo", advantages, objective, Clip(0.2, 0.28), aggregate="token")


def overlong(lengths_S: Tensor, limit: int, margin: int) -> Tensor:
    """What length adds to a reward: nothing up to `limit - margin`, then evenly less, and -1 from the limit on."""
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens does not lie within a limit of {limit}")
    return -((lengths_S - (limit - margin)) / margin).clamp(0, 1)

"""REINFORCE++ with a baseline: what a rollout gained over its siblings, in units of how much all of a step differ."""

from __future__ import annotations

from torch import Tensor

from trainer.learn.algorithms.base import Algorithm, Clip
from trainer.learn.algorithms.grpo import EPSILON, centred, objective


def advantages(rewards_S: Tensor, group_S: Tensor) -> Tensor:
    centred_S = centred(rewards_S, group_S)
    if len(centred_S) < 2:
        return centred_S
    spread = centred_S.sort().values.std()  # Sums round by their order, and this one has none.
    return centred_S / (spread + EPSILON)


REINFORCE_PP_BASELINE = Algorithm("reinforce_pp_baseline", advantages, objective, Clip(0.2, 0.2), aggregate="sequence")

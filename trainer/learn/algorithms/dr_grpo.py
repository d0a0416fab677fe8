"""Dr.GRPO: neither the siblings' spread nor a rollout's own length may weigh what it gained."""

from __future__ import annotations

from trainer.learn.algorithms.base import Algorithm, Clip
from trainer.learn.algorithms.grpo import centred, objective

DR_GRPO = Algorithm("dr_grpo", centred, objective, Clip(0.2, 0.2), aggregate="constant")

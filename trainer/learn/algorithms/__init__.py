"""Algorithms by name; one is a file that says what is its own."""

from __future__ import annotations

from trainer.learn.algorithms.base import Algorithm, Clip, Objective
from trainer.learn.algorithms.cispo import CISPO
from trainer.learn.algorithms.dapo import DAPO
from trainer.learn.algorithms.dr_grpo import DR_GRPO
from trainer.learn.algorithms.grpo import GRPO
from trainer.learn.algorithms.gspo import GSPO
from trainer.learn.algorithms.reinforce_pp import REINFORCE_PP
from trainer.learn.algorithms.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from trainer.learn.algorithms.rloo import RLOO

_ALL = (GRPO, DR_GRPO, DAPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, GSPO, CISPO)
NAMES: dict[str, Algorithm] = {each.name: each for each in _ALL}

__all__ = ["NAMES", "Algorithm", "Clip", "Objective"]

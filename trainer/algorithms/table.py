"""The RL algorithms by name: GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++, GSPO and CISPO."""

from __future__ import annotations

from trainer.algorithms.base import Algorithm
from trainer.algorithms.cispo import CISPO
from trainer.algorithms.dapo import DAPO
from trainer.algorithms.grpo import DR_GRPO, GRPO
from trainer.algorithms.gspo import GSPO
from trainer.algorithms.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from trainer.algorithms.rloo import RLOO

_ALL = (GRPO, DR_GRPO, DAPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, GSPO, CISPO)
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALL}

"""What rollouts earned, turn by turn, becomes what each turn is credited with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.learn import credit
from trainer.learn.algorithms import NAMES
from trainer.learn.settings import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Earned:
    """Rollouts S, and their turns K end to end."""

    rewards_S: Tensor
    outcomes_S: Tensor
    """Rewards less what the scores hold of them: what came at the end alone."""
    group_S: Tensor
    scores_K: Tensor
    """What tools and feedback scored each turn."""
    sequence_K: Tensor

    @property
    def rewards_K(self) -> Tensor:
        """The same by turn: a rollout's scores, and its outcome with the last."""
        return credit.with_outcome(self.scores_K, self.outcomes_S, self.sequence_K)

    def less(self, costs_S: Tensor) -> Earned:
        """With something taken off each reward."""
        return Earned(self.rewards_S - costs_S, self.outcomes_S - costs_S, self.group_S, self.scores_K, self.sequence_K)


def credited(earned: Earned, settings: AlgorithmSettings) -> Tensor:
    """Each turn, of all kinds but `gae`, which looks at tokens."""
    kind, discount = settings.credit.kind, settings.credit.discount
    if kind == "turns":
        return credit.turns(earned.rewards_K, earned.sequence_K, earned.group_S, discount)
    compare = NAMES[settings.name].advantages
    if kind == "scores":
        advantages_S = compare(earned.outcomes_S, earned.group_S)
        return credit.scores(advantages_S, earned.scores_K, earned.sequence_K, discount)
    advantages_S = compare(earned.rewards_S, earned.group_S)
    if kind == "discounted":
        return credit.discounted(advantages_S, earned.sequence_K, discount)
    return credit.outcome(advantages_S, earned.sequence_K)


def teaching(earned: Earned, settings: AlgorithmSettings) -> frozenset[int]:
    """The groups of which at least one turn is credited with more or less than nothing.

    Where the yardstick is no sibling, but the whole batch or a critic, that is every group which has a rollout. The
    distance to a reference is no part of this: it is not what a group is played for.
    """
    if settings.credit.kind == "gae" or NAMES[settings.name].whiten:
        return frozenset(earned.group_S.tolist())
    told_K = credited(earned, settings) != 0
    return frozenset(earned.group_S[earned.sequence_K[told_K]].tolist())

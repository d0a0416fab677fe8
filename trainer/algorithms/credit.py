"""Credit assignment: turns the rewards of rollouts and their turns into one advantage per turn, or per token with GAE.

Turns of all rollouts lie end to end on one axis; `sequence_K` is the rollout of each turn, counted from 0.

A turn's baseline may use what was known before the turn, and what other rollouts did. Rewards that are centred turn by
turn and then summed break this rule: a rollout that stops early is spared the means of the turns that it never took, so
that stopping itself is rewarded. Here rewards are summed first, and one baseline is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer.algorithms.named_algorithms import ALGORITHMS
from trainer.algorithms.packing import (
    count_by_segment,
    number_segments,
    segment_varies,
    sum_by_segment,
    sum_to_go,
    token_positions,
)
from trainer.algorithms.settings import AlgorithmSettings


def discounted_credit(advantages_S: Tensor, sequence_K: Tensor, discount: float) -> Tensor:
    """Gives the last turn the full advantage of its rollout, and each earlier turn less."""
    turns_left_K = count_by_segment(sequence_K, len(advantages_S))[sequence_K] - 1 - token_positions(sequence_K)
    return advantages_S[sequence_K] * discount**turns_left_K


def score_credit(advantages_S: Tensor, scores_K: Tensor, sequence_K: Tensor, discount: float = 1.0) -> Tensor:
    """Adds to the rollout's advantage the scores that tools and feedback gave from this turn on."""
    return advantages_S[sequence_K] + sum_to_go(scores_K, sequence_K, discount)


def add_outcome(scores_K: Tensor, outcomes_S: Tensor, sequence_K: Tensor) -> Tensor:
    """Adds each rollout's outcome to the score of its last turn."""
    last_K = token_positions(sequence_K) == count_by_segment(sequence_K, len(outcomes_S))[sequence_K] - 1
    return scores_K + torch.where(last_K, outcomes_S[sequence_K], 0)


def turn_credit(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor, discount: float = 1.0) -> Tensor:
    """Computes the reward to go of each turn, minus the mean reward to go of the siblings at the same turn.

    If no sibling got that far, the baseline is the siblings' mean reward for a whole rollout, minus what this rollout
    had earned before the turn. Either way the baseline does not depend on what the rollout does from the turn on, and
    the policy gradient stays unbiased.
    """
    if not len(rewards_K):
        return rewards_K
    to_go_K, turn_K = sum_to_go(rewards_K, sequence_K, discount), token_positions(sequence_K)
    whole_S = sum_by_segment(torch.where(turn_K == 0, to_go_K, 0), sequence_K, len(group_S))
    group_index_S, groups = number_segments(group_S)
    is_alone_K = (count_by_segment(group_index_S, groups) == 1)[group_index_S][sequence_K]
    earned_before_K = whole_S[sequence_K] - discount**turn_K * to_go_K
    whole_baseline_K = _mean_of_others(whole_S, group_index_S, groups)[sequence_K] - earned_before_K
    # A cell holds a group's turns with the same number.
    cell_K, cells = number_segments(group_index_S[sequence_K] * (int(turn_K.max()) + 1) + turn_K)
    has_siblings_K = count_by_segment(cell_K, cells)[cell_K] > 1
    baseline_K = torch.where(has_siblings_K, _mean_of_others(to_go_K, cell_K, cells), whole_baseline_K)
    is_zero_K = is_alone_K | (has_siblings_K & ~segment_varies(to_go_K, cell_K, cells))
    return torch.where(is_zero_K, 0, to_go_K - baseline_K)


def _mean_of_others(values_N: Tensor, segment_N: Tensor, segments: int) -> Tensor:
    """The mean of the other elements of the same segment; meaningless for an element that is alone."""
    sizes = count_by_segment(segment_N, segments)
    return (sum_by_segment(values_N, segment_N, segments)[segment_N] - values_N) / (sizes[segment_N] - 1).clamp(min=1)


def compute_gae(
    rewards_N: Tensor, values_N: Tensor, sequence_N: Tensor, discount: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over turns, or over the policy's tokens; the value after the last one is 0.

    Returns the advantages, and the returns that the critic is trained to predict."""
    has_next_N = torch.zeros_like(sequence_N, dtype=torch.bool)
    has_next_N[:-1] = sequence_N[1:] == sequence_N[:-1]
    next_N = torch.where(has_next_N, values_N.roll(-1), 0)
    advantages_N = sum_to_go(rewards_N + discount * next_N - values_N, sequence_N, discount * lam)
    return advantages_N, advantages_N + values_N


def spread_over_tokens(advantages_K: Tensor, turn_T: Tensor) -> Tensor:
    """Copies each turn's advantage to its tokens; `turn_T` is -1 for a token that belongs to no turn."""
    return torch.where(turn_T >= 0, advantages_K[turn_T.clamp(min=0)], 0)


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """The rewards of rollouts S, and the scores of their turns K, end to end."""

    rewards_S: Tensor
    outcomes_S: Tensor
    """Rewards without the part that is in the turn scores: what came at the end only."""
    group_S: Tensor
    scores_K: Tensor
    """What tools and feedback scored each turn."""
    sequence_K: Tensor

    @property
    def rewards_K(self) -> Tensor:
        """The reward of each turn: its score, and for the last turn also the rollout's outcome."""
        return add_outcome(self.scores_K, self.outcomes_S, self.sequence_K)

    def subtract(self, costs_S: Tensor) -> TurnRewards:
        """Subtracts a cost from each rollout's reward."""
        return TurnRewards(
            self.rewards_S - costs_S, self.outcomes_S - costs_S, self.group_S, self.scores_K, self.sequence_K
        )


def credit_turns(turn_rewards: TurnRewards, settings: AlgorithmSettings) -> Tensor:
    """Computes each turn's advantage, for all kinds of credit but `gae`, which works on tokens."""
    kind, discount = settings.credit.kind, settings.credit.gamma
    sequence_K, group_S = turn_rewards.sequence_K, turn_rewards.group_S
    if kind == "turns":
        return turn_credit(turn_rewards.rewards_K, sequence_K, group_S, discount)
    compute_advantages = partial(ALGORITHMS[settings.name].advantages, epsilon=settings.deviation_epsilon)
    if kind == "scores":
        advantages_S = compute_advantages(turn_rewards.outcomes_S, group_S)
        return score_credit(advantages_S, turn_rewards.scores_K, sequence_K, discount)
    advantages_S = compute_advantages(turn_rewards.rewards_S, group_S)
    if kind == "discounted":
        return discounted_credit(advantages_S, sequence_K, discount)
    return advantages_S[sequence_K]


def find_groups_with_signal(turn_rewards: TurnRewards, settings: AlgorithmSettings) -> frozenset[int]:
    """The groups in which at least one turn has an advantage other than 0.

    If the baseline is the whole batch or a critic, or if there is a teacher, that is every group with a rollout. The KL
    to the model as it began does not count: groups are not generated for its sake.
    """
    if settings.credit.kind == "gae" or ALGORITHMS[settings.name].whiten or settings.distills:
        return frozenset(turn_rewards.group_S.tolist())
    has_signal_K = credit_turns(turn_rewards, settings) != 0
    return frozenset(turn_rewards.group_S[turn_rewards.sequence_K[has_signal_K]].tolist())

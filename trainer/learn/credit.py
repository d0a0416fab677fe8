"""A turn is credited with what followed it; what it is measured by must not depend on what it did.

Turns of all rollouts lie end to end on one axis: `sequence_K` says whose a turn is, counted from 0.

A turn's yardstick may use everything that was known before the turn, and everything that other rollouts did. Rewards
that are centred index by index and then summed break this: a rollout which stops is spared the means of the turns that
it never took, so that stopping itself is paid for. Here the rewards are summed first, and one yardstick is taken off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.learn.segments import count, numbered, places, to_go, total, varied


def outcome(advantages_S: Tensor, sequence_K: Tensor) -> Tensor:
    """All turns alike."""
    return advantages_S[sequence_K]


def discounted(advantages_S: Tensor, sequence_K: Tensor, discount: float) -> Tensor:
    """The last turn is credited in full, each earlier one less."""
    after_K = count(sequence_K, len(advantages_S))[sequence_K] - 1 - places(sequence_K)
    return advantages_S[sequence_K] * discount**after_K


def scores(advantages_S: Tensor, scores_K: Tensor, sequence_K: Tensor, discount: float = 1.0) -> Tensor:
    """The outcome, and beside it what tools and feedback scored from this turn on, as they gave it."""
    return advantages_S[sequence_K] + to_go(scores_K, sequence_K, discount)


def with_outcome(scores_K: Tensor, outcomes_S: Tensor, sequence_K: Tensor) -> Tensor:
    """Scores as rewards: what a rollout was worth in the end is paid for its last turn."""
    last_K = places(sequence_K) == count(sequence_K, len(outcomes_S))[sequence_K] - 1
    return scores_K + torch.where(last_K, outcomes_S[sequence_K], 0)


def turns(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor, discount: float = 1.0) -> Tensor:
    """All that a turn and those after it earned, less what the siblings earned from there, if they got as far.

    Where no sibling did, they tell what a whole rollout earns, and what this one had by then comes off that. Either
    way the rollout's own doing from the turn on has no part in the yardstick, and the policy gradient stays unbiased.
    """
    if not len(rewards_K):
        return rewards_K
    earned_K, place_K = to_go(rewards_K, sequence_K, discount), places(sequence_K)
    first_S = total(torch.where(place_K == 0, earned_K, 0), sequence_K, len(group_S))
    cell_S, cells = numbered(group_S)
    alone_K = (count(cell_S, cells) == 1)[cell_S][sequence_K]
    had_K = first_S[sequence_K] - discount**place_K * earned_K
    whole_K = _others(first_S, cell_S, cells)[sequence_K] - had_K
    # A group's turns at one place are a cell.
    spot_K, spots = numbered(cell_S[sequence_K] * (int(place_K.max()) + 1) + place_K)
    met_K = count(spot_K, spots)[spot_K] > 1
    gained_K = earned_K - torch.where(met_K, _others(earned_K, spot_K, spots), whole_K)
    return torch.where(alone_K | (met_K & ~varied(earned_K, spot_K, spots)), 0, gained_K)


def _others(values_N: Tensor, cell_N: Tensor, cells: int) -> Tensor:
    """The mean of the others of one's cell; of no meaning where there are none."""
    sizes = count(cell_N, cells)
    return (total(values_N, cell_N, cells)[cell_N] - values_N) / (sizes[cell_N] - 1).clamp(min=1)


class Judged(NamedTuple):
    """By a critic."""

    advantages_N: Tensor
    returns_N: Tensor
    """What the critic should have said."""


def gae(rewards_N: Tensor, values_N: Tensor, sequence_N: Tensor, discount: float, trust: float) -> Judged:
    """Against a critic's values, of turns or of the policy's tokens alone; nothing is expected after the last."""
    inside_N = torch.zeros_like(sequence_N, dtype=torch.bool)
    inside_N[:-1] = sequence_N[1:] == sequence_N[:-1]
    next_N = torch.where(inside_N, values_N.roll(-1), 0)
    advantages_N = to_go(rewards_N + discount * next_N - values_N, sequence_N, discount * trust)
    return Judged(advantages_N, advantages_N + values_N)


def spread(advantages_K: Tensor, turn_T: Tensor) -> Tensor:
    """From turns to their tokens; `turn_T` is -1 for a token that belongs to no turn."""
    return torch.where(turn_T >= 0, advantages_K[turn_T.clamp(min=0)], 0)

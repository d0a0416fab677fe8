"""What a rollout earned is laid upon the tokens that earned it, and what nothing is learned from is left out openly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum

import torch
from torch import Tensor

from trainer.learn import credit
from trainer.learn.aggregate import Totals
from trainer.learn.algorithms import NAMES
from trainer.learn.algorithms.reinforce_pp import whitened
from trainer.learn.batch import Row
from trainer.learn.earned import Earned, credited
from trainer.learn.finite import finite_S
from trainer.learn.lesson import Draft, Lesson
from trainer.learn.segments import count, total
from trainer.learn.settings import AlgorithmSettings

Lists = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Worth:
    """A step's rows, and what it divides by."""

    rows: tuple[Row, ...]
    """Those with something to learn from, in the order of their drafts. Without any, a step changes nothing."""
    totals: Totals
    """Of all rows, the idle ones included: they have no gradient, but they are part of the mean that a step is.

    So leaving them out saves time and changes nothing, and a group that teaches weighs no more beside groups that do
    not. Where those shall not count, `dynamic` puts others in their place before a lesson is made of them.
    """
    idle: int
    """Rows that were left out."""
    returns: tuple[tuple[float, ...], ...] = ()
    """With `gae`, of each row's tokens, what the critic should have said; 0 where the policy did not write."""
    made: tuple[Row, ...] = ()
    """All rows, those that were left out included."""

    @property
    def metrics(self) -> dict[str, float]:
        trained = sum(weight > 0 for row in self.rows for weight in row.weights)
        return {"update/rows": float(len(self.rows)), "update/idle": float(self.idle), "update/tokens": float(trained)}


def rows(
    given: Lesson, settings: AlgorithmSettings, *, distances: Sequence[float] | None = None, values: Lists | None = None
) -> Worth:
    """Advantages for each token, with no gradient and no model.

    `distances`: of each rollout, how far it is from the reference policy, where that is taken off its reward.
    `values`: of each draft's tokens, what the critic expected before the token was written, for `gae`.
    """
    earned = given.earned.less(_costs(given, settings, distances))
    returns: list[tuple[float, ...]] = []
    if settings.credit.kind == "gae":
        advantages_T, returns_T = _judged(given, earned, settings, values)
        returns = _by_draft(returns_T, given.drafts)
    else:
        advantages_T = credit.spread(credited(earned, settings), given.turn_T)
    if NAMES[settings.name].whiten:
        advantages_T = whitened(advantages_T, _flat([draft.weights for draft in given.drafts]) > 0)
    made = [
        _row(draft, advantages, given.groups[draft.rollout])
        for draft, advantages in zip(given.drafts, _by_draft(advantages_T, given.drafts), strict=True)
    ]
    weight = fsum(weight for row in made for weight in row.weights)
    totals = Totals(weight, sum(any(row.weights) for row in made))
    needed = [place for place, row in enumerate(made) if totals.sequences and _needed(row, settings)]
    kept = tuple(made[place] for place in needed)
    said = tuple(returns[place] for place in needed) if returns else ()
    return Worth(kept, totals, len(made) - len(kept), said, tuple(made))


def _row(draft: Draft, advantages: Sequence[float], group: int) -> Row:
    worth = advantages, draft.weights, group
    return Row(draft.name, draft.ids, draft.mask, draft.engine, *worth, draft.stale, draft.pictures)


def _costs(given: Lesson, settings: AlgorithmSettings, distances: Sequence[float] | None) -> Tensor:
    """What the distance to the reference takes off each rollout's reward, before siblings are compared."""
    if not (settings.kl.coefficient and settings.kl.place == "reward"):
        return torch.zeros(len(given.names), dtype=torch.float64)
    if distances is None or len(distances) != len(given.names):
        raise ValueError(f"a KL term in the reward needs a distance of each of {len(given.names)} rollouts")
    distances_S = torch.tensor(distances, dtype=torch.float64)
    finite_S("a distance to the reference of", distances_S, given.names)
    return settings.kl.coefficient * distances_S


def _judged(given: Lesson, earned: Earned, settings: AlgorithmSettings, values: Lists | None) -> tuple[Tensor, Tensor]:
    """By a critic, token by token: what a turn earned comes with its last token, or else with the last before it."""
    sizes = [len(draft.ids) for draft in given.drafts]
    if values is None or [len(one) for one in values] != sizes:
        raise ValueError(f"gae needs what the critic says of each token: of {len(sizes)} drafts, {sum(sizes)} tokens")
    mask_T = given.turn_T >= 0
    turn_N = given.turn_T[mask_T]
    sequence_N, values_N = earned.sequence_K[turn_N], _flat(values)[mask_T]
    finite_S("a critic's value of", values_N, [given.names[place] for place in sequence_N.tolist()])
    sizes_S = count(sequence_N, len(given.names))
    first_S = sizes_S.cumsum(0) - sizes_S
    last_K = count(turn_N, len(earned.scores_K)).cumsum(0) - 1
    paid_K = torch.maximum(last_K, first_S[earned.sequence_K])
    rewards_N = total(earned.rewards_K, paid_K, len(turn_N))
    judged = credit.gae(rewards_N, values_N, sequence_N, settings.credit.discount, settings.credit.trust)
    nothing_T = torch.zeros(len(mask_T), dtype=torch.float64)
    advantages_T, returns_T = (nothing_T.masked_scatter(mask_T, found_N) for found_N in judged)
    return advantages_T, returns_T


def _needed(row: Row, settings: AlgorithmSettings) -> bool:
    """Whether anything would be lost without it: a gradient, or what a critic could learn."""
    if settings.credit.kind == "gae":
        return True
    if settings.kl.coefficient and settings.kl.place == "loss":
        return any(row.weights)
    return any(weight and advantage for weight, advantage in zip(row.weights, row.advantages, strict=True))


def _flat(lists: Lists) -> Tensor:
    return torch.tensor([value for one in lists for value in one], dtype=torch.float64)


def _by_draft(values_T: Tensor, drafts: Sequence[Draft]) -> list[tuple[float, ...]]:
    values = values_T.tolist()
    stops = accumulate((len(draft.ids) for draft in drafts), initial=0)
    return [tuple(values[start:stop]) for start, stop in pairwise(stops)]

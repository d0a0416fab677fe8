"""A lesson is what a step learns from: tokens and what they earned, before anybody says what each is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from trainer.learn.algorithms.dapo import overlong
from trainer.learn.earned import Earned, teaching
from trainer.learn.finite import finite_S
from trainer.learn.rounds import Weigh, every, weights
from trainer.learn.settings import AlgorithmSettings
from trainer.ledger import Author, Ledger, Place
from trainer.reward.scored import Scored, ScoredGroup
from trainer.run.rollout import Rollout


@dataclass(frozen=True, slots=True)
class Draft:
    """One ledger in which the policy wrote."""

    name: str
    """What errors call its rollout."""
    rollout: int
    """Its rollout's place in the lesson."""
    ids: Sequence[int]
    mask: Sequence[bool]
    engine: Sequence[float]
    """The logprobs at sampling; 0.0 where nothing was sampled."""
    weights: Sequence[float]
    turns: Sequence[int]
    """Of each token that the policy wrote, the turn, counted over all ledgers of the rollout; -1 elsewhere."""
    stale: Sequence[bool] = ()
    """The tokens that other weights sampled than those which learn; left out where there are none."""
    pictures: Sequence[Place] = ()
    """Where they stand among the ids, as wide as the model sees them."""


@dataclass(frozen=True)
class Lesson:
    """The rollouts of a step, group by group. What is said of each stands at its place."""

    drafts: tuple[Draft, ...]
    """Rollout by rollout, each one's ledgers oldest first."""
    names: tuple[str, ...]
    groups: tuple[int, ...]
    """Places among the groups that the lesson was made of."""
    rewards: tuple[float, ...]
    """With what length costs taken off."""
    scores: tuple[tuple[float, ...], ...]
    """Of each turn, what tools and feedback scored it."""
    spread: tuple[float, ...] = ()
    """Of each reward, the part that `scores` hold as well; left out where it is nothing."""
    teaching: frozenset[int] = frozenset()
    """The groups from which something is learned."""
    unwritten: tuple[str, ...] = ()
    """Rollouts in which the policy wrote nothing. They tell nothing of it, and are no part of the lesson."""

    @cached_property
    def earned(self) -> Earned:
        rewards_S = torch.tensor(self.rewards, dtype=torch.float64)
        spread_S = torch.tensor(self.spread or (0.0,) * len(rewards_S), dtype=torch.float64)
        turns_S = torch.tensor([len(scores) for scores in self.scores], dtype=torch.long)
        return Earned(
            rewards_S=rewards_S,
            outcomes_S=rewards_S - spread_S,
            group_S=torch.tensor(self.groups, dtype=torch.long),
            scores_K=torch.tensor([score for scores in self.scores for score in scores], dtype=torch.float64),
            sequence_K=torch.arange(len(turns_S)).repeat_interleave(turns_S),
        )

    @cached_property
    def turn_T(self) -> Tensor:
        """Of the drafts' tokens, end to end, the place among the turns of all rollouts; -1 where they have no turn."""
        begun = list(accumulate(map(len, self.scores), initial=0))
        turns = (begun[draft.rollout] + turn if turn >= 0 else -1 for draft in self.drafts for turn in draft.turns)
        return torch.tensor(list(turns), dtype=torch.long)


def lesson(
    groups: Sequence[ScoredGroup], settings: AlgorithmSettings, rounds: Weigh, version: int | None = None
) -> Lesson:
    """Groups stand in the order given, a group's rollouts in that of their index, whichever was done first. `version`
    is that of the weights which learn; None takes all tokens for theirs."""
    found = [
        (number, one)
        for number, group in enumerate(groups)
        for one in sorted(group.scored, key=lambda scored: scored.rollout.index)
    ]
    kept = [(number, one) for number, one in found if _length(one.rollout)]
    scored = [one for _, one in kept]
    made = Lesson(
        drafts=tuple(chain.from_iterable(_drafts(at, one.rollout, rounds, version) for at, one in enumerate(scored))),
        names=tuple(one.rollout.name for one in scored),
        groups=tuple(number for number, _ in kept),
        rewards=_rewards(scored, settings),
        scores=tuple(map(_scores, scored)),
        spread=tuple(one.spread for one in scored),
        unwritten=tuple(one.rollout.name for _, one in found if not _length(one.rollout)),
    )
    return replace(made, teaching=teaching(made.earned, settings))


def teaches(group: ScoredGroup, settings: AlgorithmSettings) -> bool:
    """Whether anything is learned from it: what dynamic sampling keeps."""
    return bool(lesson([group], settings, every).teaching)


def metrics(given: Lesson) -> dict[str, float]:
    return {
        "groups/count": float(len(set(given.groups))),
        "groups/teaching": float(len(given.teaching)),
        "rollout/unwritten": float(len(given.unwritten)),
    }


def _length(rollout: Rollout) -> int:
    """In tokens that the policy wrote: what tools answer at length is not its doing."""
    return sum(len(turn.ids) for turn in rollout.turns)


def _drafts(place: int, rollout: Rollout, rounds: Weigh, version: int | None) -> Iterator[Draft]:
    """Turns are counted, and rounds weighed, over all ledgers: the last round is the rollout's, not each ledger's."""
    ledgers = [ledger.expanded for ledger in rollout.ledgers]
    whole = Ledger(tuple(chain.from_iterable(ledgers))) if rollout.earlier else ledgers[0]
    weight_T, turn_T = weights(whole, rounds, rollout.name), _turns(whole)
    stops = accumulate(map(len, ledgers), initial=0)
    for ledger, (start, stop) in zip(ledgers, pairwise(stops), strict=True):
        if any(ledger.mask):
            weighed, turns = weight_T[start:stop], turn_T[start:stop]
            stale = _stale(ledger, version)
            written = ledger.ids, ledger.mask, ledger.logprobs
            yield Draft(rollout.name, place, *written, weighed, turns, stale, ledger.places)


def _stale(ledger: Ledger, version: int | None) -> tuple[bool, ...]:
    if version is None or all(turn.version == version and not turn.before for turn in ledger.turns):
        return ()
    return tuple(mine and one != version for mine, one in zip(ledger.mask, ledger.versions, strict=True))


def _turns(ledger: Ledger) -> tuple[int, ...]:
    mine = [entry.author is Author.POLICY for entry in ledger]
    counted = zip(ledger, mine, accumulate(mine), strict=True)
    return tuple(chain.from_iterable((turns - 1 if own else -1,) * len(entry.ids) for entry, own, turns in counted))


def _rewards(scored: Sequence[Scored], settings: AlgorithmSettings) -> tuple[float, ...]:
    rewards_S = torch.tensor([one.reward for one in scored], dtype=torch.float64)
    finite_S("a reward of", rewards_S, [one.rollout.name for one in scored])
    if long := settings.overlong:
        lengths_S = torch.tensor([_length(one.rollout) for one in scored], dtype=torch.float64)
        rewards_S = rewards_S + long.cost * overlong(lengths_S, long.limit, long.margin)
    return tuple(rewards_S.tolist())


def _scores(scored: Scored) -> tuple[float, ...]:
    name, turns = scored.rollout.name, len(scored.rollout.turns)
    if len(scored.turns) != turns:
        raise ValueError(f"rollout {name}: {len(scored.turns)} scores for {turns} turns")
    told = torch.tensor([*scored.turns, scored.spread], dtype=torch.float64)
    finite_S("a turn with a score of", told, [name] * len(told))
    return scored.turns

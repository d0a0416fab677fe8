"""Builds the batch of a training step: token sequences, rewards and turn scores, before advantages are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from trainer.algorithms.credit import TurnRewards, find_groups_with_signal
from trainer.algorithms.named_algorithms import overlong_penalty
from trainer.algorithms.packing import check_rollouts_finite
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import TokenWeightFn, compute_token_weights, weigh_all_turns
from trainer.ledger import Author, Experts, Ledger, MediaSpan, no_experts
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.rollout import Rollout


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One ledger in which the policy wrote something."""

    name: str
    """The rollout's name in error messages."""
    rollout_index: int
    """The rollout's index in the batch."""
    ids: Sequence[int]
    mask: Sequence[bool]
    engine_logprobs: Sequence[float]
    """The logprobs at sampling; 0.0 where nothing was sampled."""
    weights: Sequence[float]
    turns: Sequence[int]
    """The turn of each token that the policy wrote, counted over all ledgers of the rollout; -1 elsewhere."""
    stale: Sequence[bool] = ()
    """The tokens that were sampled by older weights than those being trained; empty if there are none."""
    media_spans: Sequence[MediaSpan] = ()
    """Where images stand among the ids, as wide as the model sees them."""
    experts: Experts = field(default_factory=no_experts)
    """The experts that the engine sent each token to, one token after the other; empty if it did not tell them."""


@dataclass(frozen=True)
class TrainBatch:
    """The rollouts of a step, group by group; lists of rollouts are parallel."""

    sequences: tuple[TrainSequence, ...]
    """Rollout by rollout, each one's ledgers oldest first."""
    names: tuple[str, ...]
    groups: tuple[int, ...]
    """Each rollout's group, as an index into the groups that the batch was built from."""
    rewards: tuple[float, ...]
    """Rewards, with the length penalty subtracted."""
    turn_scores: tuple[tuple[float, ...], ...]
    """What tools and feedback scored each turn."""
    rewards_from_turns: tuple[float, ...] = ()
    """The part of each reward that is in `turn_scores` too; empty if there is none."""
    groups_with_signal: frozenset[int] = frozenset()
    """The groups that have an advantage other than 0."""
    empty_rollouts: tuple[str, ...] = ()
    """Rollouts in which the policy wrote nothing; they are not part of the batch."""

    @cached_property
    def turn_rewards(self) -> TurnRewards:
        rewards_S = torch.tensor(self.rewards, dtype=torch.float64)
        from_turns_S = torch.tensor(self.rewards_from_turns or (0.0,) * len(rewards_S), dtype=torch.float64)
        turns_S = torch.tensor([len(scores) for scores in self.turn_scores], dtype=torch.long)
        return TurnRewards(
            rewards_S=rewards_S,
            outcomes_S=rewards_S - from_turns_S,
            group_S=torch.tensor(self.groups, dtype=torch.long),
            scores_K=torch.tensor([score for scores in self.turn_scores for score in scores], dtype=torch.float64),
            sequence_K=torch.arange(len(turns_S)).repeat_interleave(turns_S),
        )

    @cached_property
    def turn_T(self) -> Tensor:
        """The turn of each token of all sequences, counted over the turns of all rollouts; -1 for no turn."""
        first_turns = list(accumulate(map(len, self.turn_scores), initial=0))
        turns = (
            first_turns[sequence.rollout_index] + turn if turn >= 0 else -1
            for sequence in self.sequences
            for turn in sequence.turns
        )
        return torch.tensor(list(turns), dtype=torch.long)


def build_train_batch(
    groups: Sequence[ScoredGroup],
    settings: AlgorithmSettings,
    token_weight_fn: TokenWeightFn,
    version: int | None = None,
) -> TrainBatch:
    """Builds a batch from groups in the order given, a group's rollouts in the order of their index.

    `version` is that of the weights being trained; with None, no token counts as stale.
    """
    ordered = [
        (group_index, scored)
        for group_index, group in enumerate(groups)
        for scored in sorted(group.scored, key=lambda scored: scored.rollout.index)
    ]
    kept = [(group_index, scored) for group_index, scored in ordered if count_policy_tokens(scored.rollout)]
    rollouts = [scored for _, scored in kept]
    batch = TrainBatch(
        sequences=tuple(
            chain.from_iterable(
                _build_sequences(index, scored.rollout, token_weight_fn, version)
                for index, scored in enumerate(rollouts)
            )
        ),
        names=tuple(scored.rollout.name for scored in rollouts),
        groups=tuple(group_index for group_index, _ in kept),
        rewards=_final_rewards(rollouts, settings),
        turn_scores=tuple(map(_turn_scores, rollouts)),
        rewards_from_turns=tuple(scored.reward_from_turns for scored in rollouts),
        empty_rollouts=tuple(scored.rollout.name for _, scored in ordered if not count_policy_tokens(scored.rollout)),
    )
    return replace(batch, groups_with_signal=find_groups_with_signal(batch.turn_rewards, settings))


def has_learning_signal(group: ScoredGroup, settings: AlgorithmSettings) -> bool:
    """Whether a group has an advantage other than 0: the groups that dynamic sampling keeps."""
    return bool(build_train_batch([group], settings, weigh_all_turns).groups_with_signal)


def compute_batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Counts the batch's groups, those with a signal, and the empty rollouts."""
    return {
        "groups/count": float(len(set(batch.groups))),
        "groups/teaching": float(len(batch.groups_with_signal)),
        "rollout/unwritten": float(len(batch.empty_rollouts)),
    }


def count_policy_tokens(rollout: Rollout) -> int:
    """The rollout's length in tokens that the policy wrote."""
    return sum(len(turn.ids) for turn in rollout.turns)


def _build_sequences(
    rollout_index: int, rollout: Rollout, token_weight_fn: TokenWeightFn, version: int | None
) -> Iterator[TrainSequence]:
    """Turns are counted and weighed over all ledgers together: the last turn is the rollout's, not each ledger's."""
    ledgers = [ledger.expanded for ledger in rollout.ledgers]
    joined = Ledger(tuple(chain.from_iterable(ledgers))) if rollout.earlier else ledgers[0]
    weights, turns = compute_token_weights(joined, token_weight_fn, rollout.name), _turn_numbers(joined)
    ends = accumulate(map(len, ledgers), initial=0)
    for ledger, (start, stop) in zip(ledgers, pairwise(ends), strict=True):
        if any(ledger.mask):
            yield TrainSequence(
                rollout.name,
                rollout_index,
                ledger.ids,
                ledger.mask,
                ledger.logprobs,
                weights[start:stop],
                turns[start:stop],
                _stale_tokens(ledger, version),
                ledger.media_spans,
                ledger.experts,
            )


def _stale_tokens(ledger: Ledger, version: int | None) -> tuple[bool, ...]:
    if version is None or all(turn.version == version and not turn.earlier_versions for turn in ledger.turns):
        return ()
    return tuple(
        is_policy and sampled_by != version for is_policy, sampled_by in zip(ledger.mask, ledger.versions, strict=True)
    )


def _turn_numbers(ledger: Ledger) -> tuple[int, ...]:
    is_policy = [entry.author is Author.POLICY for entry in ledger]
    entries = zip(ledger, is_policy, accumulate(is_policy), strict=True)
    return tuple(chain.from_iterable((turns - 1 if own else -1,) * len(entry.ids) for entry, own, turns in entries))


def _final_rewards(rollouts: Sequence[ScoredRollout], settings: AlgorithmSettings) -> tuple[float, ...]:
    rewards_S = torch.tensor([scored.reward for scored in rollouts], dtype=torch.float64)
    check_rollouts_finite("a reward of", rewards_S, [scored.rollout.name for scored in rollouts])
    if overlong := settings.overlong:
        lengths_S = torch.tensor([count_policy_tokens(scored.rollout) for scored in rollouts], dtype=torch.float64)
        rewards_S = rewards_S + overlong.penalty * overlong_penalty(lengths_S, overlong.limit, overlong.buffer)
    return tuple(rewards_S.tolist())


def _turn_scores(scored: ScoredRollout) -> tuple[float, ...]:
    name, turns = scored.rollout.name, len(scored.rollout.turns)
    if len(scored.turn_scores) != turns:
        raise ValueError(f"rollout {name}: {len(scored.turn_scores)} scores for {turns} turns")
    numbers = torch.tensor([*scored.turn_scores, scored.reward_from_turns], dtype=torch.float64)
    check_rollouts_finite("a turn with a score of", numbers, [name] * len(numbers))
    return scored.turn_scores

"""Computes per-token advantages from the turn rewards of a train batch, and drops rows that have no gradient."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum

import torch
from torch import Tensor

from trainer.algorithms import credit
from trainer.algorithms.credit import TurnRewards, credit_turns
from trainer.algorithms.loss import StepTotals
from trainer.algorithms.named_algorithms import ALGORITHMS, whiten
from trainer.algorithms.packing import BatchRow, check_rollouts_finite, count_by_segment, sum_by_segment
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainBatch, TrainSequence

TokenValues = Sequence[Sequence[float]]


@dataclass(frozen=True)
class TokenAdvantages:
    """The rows of a step with their token advantages, and the totals that the loss is divided by."""

    rows: tuple[BatchRow, ...]
    """The rows with a gradient, in the order of their sequences. If there are none, the step changes nothing."""
    totals: StepTotals
    """Totals over all rows. Skipped rows have no gradient, but they count in the mean, so skipping them saves time and
    changes nothing: a group with a signal weighs no more because other groups have none. With dynamic sampling, such
    groups are replaced before the batch is built.
    """
    skipped: int
    """How many rows have no gradient."""
    returns: tuple[tuple[float, ...], ...] = ()
    """With `gae`: the critic's target for each token of `rows`; 0 where the policy did not write."""
    all_rows: tuple[BatchRow, ...] = ()
    """All rows, including the skipped ones."""

    @property
    def metrics(self) -> dict[str, float]:
        trained = sum(weight > 0 for row in self.rows for weight in row.weights)
        return {
            "update/rows": float(len(self.rows)),
            "update/idle": float(self.skipped),
            "update/tokens": float(trained),
        }


def compute_token_advantages(
    batch: TrainBatch,
    settings: AlgorithmSettings,
    *,
    reference_kl: Sequence[float] | None = None,
    values: TokenValues | None = None,
) -> TokenAdvantages:
    """Computes an advantage for each token; needs no model.

    `reference_kl`: each rollout's KL to the reference policy, if it is subtracted from the reward.
    `values`: the critic's value before each token of each sequence, for `gae`.
    """
    turn_rewards = batch.turn_rewards.subtract(_kl_costs(batch, settings, reference_kl))
    returns: list[tuple[float, ...]] = []
    if settings.credit.kind == "gae":
        advantages_T, returns_T = _apply_gae(batch, turn_rewards, settings, values)
        returns = _split_by_sequence(returns_T, batch.sequences)
    else:
        advantages_T = credit.spread_over_tokens(credit_turns(turn_rewards, settings), batch.turn_T)
    if ALGORITHMS[settings.name].whiten:
        trained_T = _flatten([sequence.weights for sequence in batch.sequences]) > 0
        advantages_T = whiten(advantages_T, trained_T, settings.deviation_epsilon)
    weight_of: dict[int, float] = defaultdict(float)
    ledgers_of = Counter(sequence.rollout_index for sequence in batch.sequences)
    for sequence in batch.sequences:
        weight_of[sequence.rollout_index] += fsum(sequence.weights)
    all_rows = [
        build_row(
            sequence,
            advantages,
            batch.groups[sequence.rollout_index],
            weight_of[sequence.rollout_index] if ledgers_of[sequence.rollout_index] > 1 else None,
        )
        for sequence, advantages in zip(batch.sequences, _split_by_sequence(advantages_T, batch.sequences), strict=True)
    ]
    weight = fsum(weight for row in all_rows for weight in row.weights)
    totals = StepTotals(weight, sum(weight > 0 or settings.count_untrained for weight in weight_of.values()))
    needed = [index for index, row in enumerate(all_rows) if totals.weight and _has_gradient(row, settings)]
    rows = tuple(all_rows[index] for index in needed)
    needed_returns = tuple(returns[index] for index in needed) if returns else ()
    return TokenAdvantages(rows, totals, len(all_rows) - len(rows), needed_returns, tuple(all_rows))


def build_row(
    sequence: TrainSequence, advantages: Sequence[float], group: int, rollout_weight: float | None = None
) -> BatchRow:
    """A row of a batch, with an advantage for each token."""
    return BatchRow(
        sequence.name,
        sequence.ids,
        sequence.mask,
        sequence.engine_logprobs,
        advantages,
        sequence.weights,
        group,
        sequence.stale,
        sequence.media_spans,
        rollout_weight,
        sequence.experts,
    )


def _kl_costs(batch: TrainBatch, settings: AlgorithmSettings, reference_kl: Sequence[float] | None) -> Tensor:
    """What each rollout's KL to the reference takes off its reward, before siblings are compared."""
    if not (settings.kl.coefficient and settings.kl.in_reward):
        return torch.zeros(len(batch.names), dtype=torch.float64)
    if reference_kl is None or len(reference_kl) != len(batch.names):
        raise ValueError(f"a KL term in the reward needs the KL of each of {len(batch.names)} rollouts")
    kl_S = torch.tensor(reference_kl, dtype=torch.float64)
    check_rollouts_finite("a KL to the reference of", kl_S, batch.names)
    return settings.kl.coefficient * kl_S


def _apply_gae(
    batch: TrainBatch, turn_rewards: TurnRewards, settings: AlgorithmSettings, values: TokenValues | None
) -> tuple[Tensor, Tensor]:
    """Runs GAE over the policy's tokens. A turn's reward arrives with its last token, or the last token before it if
    the turn has none."""
    sizes = [len(sequence.ids) for sequence in batch.sequences]
    if values is None or [len(of_sequence) for of_sequence in values] != sizes:
        raise ValueError(f"gae needs the critic's value of each token: {len(sizes)} sequences, {sum(sizes)} tokens")
    mask_T = batch.turn_T >= 0
    turn_N = batch.turn_T[mask_T]
    sequence_N, values_N = turn_rewards.sequence_K[turn_N], _flatten(values)[mask_T]
    check_rollouts_finite("a critic's value of", values_N, [batch.names[index] for index in sequence_N.tolist()])
    sizes_S = count_by_segment(sequence_N, len(batch.names))
    first_S = sizes_S.cumsum(0) - sizes_S
    last_K = count_by_segment(turn_N, len(turn_rewards.scores_K)).cumsum(0) - 1
    rewarded_K = torch.maximum(last_K, first_S[turn_rewards.sequence_K])
    rewards_N = sum_by_segment(turn_rewards.rewards_K, rewarded_K, len(turn_N))
    estimate = credit.compute_gae(rewards_N, values_N, sequence_N, settings.credit.gamma, settings.credit.lam)
    zeros_T = torch.zeros(len(mask_T), dtype=torch.float64)
    advantages_T, returns_T = (zeros_T.masked_scatter(mask_T, part_N) for part_N in estimate)
    return advantages_T, returns_T


def _has_gradient(row: BatchRow, settings: AlgorithmSettings) -> bool:
    """Whether the policy, or a critic, has something to learn from this row."""
    if settings.credit.kind == "gae":
        return True
    has_bonus = settings.entropy_coefficient or settings.adaptive_entropy
    if has_bonus or (settings.kl.coefficient and not settings.kl.in_reward):
        return any(row.weights)
    return any(weight and advantage for weight, advantage in zip(row.weights, row.advantages, strict=True))


def _flatten(lists: TokenValues) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=torch.float64)


def _split_by_sequence(values_T: Tensor, sequences: Sequence[TrainSequence]) -> list[tuple[float, ...]]:
    values = values_T.tolist()
    ends = accumulate((len(sequence.ids) for sequence in sequences), initial=0)
    return [tuple(values[start:stop]) for start, stop in pairwise(ends)]

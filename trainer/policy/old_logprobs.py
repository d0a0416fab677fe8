"""Computes old and reference logprobs and critic values before a training step, without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise

import torch

from trainer.algorithms.kl import estimate_kl
from trainer.algorithms.packing import Batch, BatchRow
from trainer.algorithms.settings import Estimator
from trainer.algorithms.train_batch import TrainBatch, TrainSequence
from trainer.policy.critic import Critic
from trainer.policy.dealt_batches import deal_batches
from trainer.policy.logprobs import LogprobSource
from trainer.policy.policy import Policy


@torch.no_grad()
def compute_reference_kl(
    train_batch: TrainBatch, policy: Policy, reference: LogprobSource, estimator: Estimator, temperature: float
) -> list[float]:
    """Computes the KL of each rollout, as it was sampled, to the reference policy."""
    kl = [0.0] * len(train_batch.rewards)
    for sequences, batch in _iterate_batches(train_batch, policy):
        reference_T = recompute_logprobs(batch, reference, temperature)
        kl_T = estimate_kl(batch.engine_logprobs_T, replace(batch, ref_logprobs_T=reference_T), estimator)
        for index, value in zip(sequences, batch.sum_by_sequence(kl_T).tolist(), strict=bool(sequences)):
            kl[train_batch.sequences[index].rollout_index] += value
    return policy.ranks.add(kl)


@torch.no_grad()
def compute_critic_values(train_batch: TrainBatch, policy: Policy, critic: Critic) -> list[list[float]]:
    """Computes the critic's value before each token of each sequence."""
    sizes = [len(sequence.ids) for sequence in train_batch.sequences]
    spans = list(pairwise(accumulate(sizes, initial=0)))
    values = [0.0] * sum(sizes)
    for sequences, batch in _iterate_batches(train_batch, policy):
        values_T = iter(critic.compute_values(batch.ids_T, batch.sequence_T, batch.images).tolist())
        for index in sequences:
            values[slice(*spans[index])] = islice(values_T, sizes[index])
    values = policy.ranks.add(values)
    return [values[start:stop] for start, stop in spans]


@torch.no_grad()
def recompute_logprobs(batch: Batch, source: LogprobSource, temperature: float) -> torch.Tensor:
    """Computes the logprobs of the trained tokens under the reference, or under the policy before the step."""
    inputs = batch.ids_T, batch.sequence_T, batch.trained_T
    return source.compute_batch_logprobs(*inputs, temperature, batch.images).logprobs_T


def _iterate_batches(train_batch: TrainBatch, policy: Policy) -> Iterator[tuple[Sequence[int], Batch]]:
    """This rank's sequences, as indexes; none for a batch that only keeps this rank in step with the others."""
    groups = train_batch.groups
    rows = [_row_without_advantages(sequence, groups[sequence.rollout_index]) for sequence in train_batch.sequences]
    for number, dealt in enumerate(deal_batches(rows, policy.ranks, policy.settings.tokens)[0]):
        policy.ranks.report(f"pass {number + 1} without a gradient")
        yield dealt.indexes, dealt.batch.to(policy.device)


def _row_without_advantages(sequence: TrainSequence, group: int) -> BatchRow:
    return BatchRow(
        sequence.name,
        sequence.ids,
        sequence.mask,
        sequence.engine_logprobs,
        [0.0] * len(sequence.ids),
        sequence.weights,
        group,
        media_spans=sequence.media_spans,
    )

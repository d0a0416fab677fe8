"""Computes the loss of a step without a model, to find out whether settings and rollouts fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.loss import compute_loss, read_losses
from trainer.algorithms.packing import pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import TokenWeightFn
from trainer.algorithms.train_batch import build_train_batch
from trainer.reward.scorer import ScoredGroup


def rehearse_loss(groups: Sequence[ScoredGroup], settings: AlgorithmSettings, token_weight_fn: TokenWeightFn) -> int:
    """Makes the loss of these groups and its gradient with made-up logprobs; returns the number of trained tokens."""
    batch = build_train_batch(groups, settings, token_weight_fn)
    zeros = [[0.0] * len(sequence.ids) for sequence in batch.sequences]
    reference = [0.0] * len(batch.rewards) if settings.kl.coefficient and settings.kl.in_reward else None
    values = zeros if settings.credit.kind == "gae" else None
    advantages = compute_token_advantages(batch, settings, reference_kl=reference, values=values)
    if not advantages.rows:
        return 0
    packed = pack(advantages.rows)
    logprobs_T = torch.full((len(packed.ids_T),), -0.5, requires_grad=True)
    packed = packed.with_old_logprobs(logprobs_T.detach(), settings.ratio == "proximal")
    if settings.kl.coefficient and not settings.kl.in_reward:
        packed = replace(packed, ref_logprobs_T=logprobs_T.detach())
    loss = compute_loss(logprobs_T, packed, advantages.totals, settings, torch.zeros_like(logprobs_T))
    loss.value.backward()  # type: ignore[no-untyped-call]
    read_losses([loss])
    return loss.tokens

"""The mismatch between engine and trainer logprobs: its size, and importance weights that correct for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.base import MAX_LOG_RATIO
from trainer.algorithms.packing import Batch
from trainer.algorithms.settings import MismatchSettings


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's logprobs are from the engine's, over trained tokens that are not stale."""

    mean: float
    """The mean of |log trainer - log engine|."""
    maximum: float
    kl: float
    """KL of the engine's policy from the trainer's, by k3: 0 or more, in nats per token."""
    tokens: int

    def is_within(self, bound: float) -> bool:
        """Whether no token is further off, so that the engine's logprobs can stand for the old policy's."""
        return self.tokens > 0 and self.maximum <= bound


def measure_mismatch(batch: Batch) -> Mismatch:
    """Measures the mismatch of a batch whose old logprobs are the trainer's."""
    log = (batch.old_logprobs_T - batch.engine_logprobs_T)[batch.fresh_T].detach().double()
    if not len(log):
        return Mismatch(0.0, 0.0, 0.0, 0)
    kl = (log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 - log).mean()
    return Mismatch(float(log.abs().mean()), float(log.abs().max()), float(kl), len(log))


def merge_mismatches(parts: Sequence[Mismatch]) -> Mismatch:
    """The mismatch of several batches together."""
    tokens = sum(part.tokens for part in parts)
    mean, kl = (sum(getattr(part, name) * part.tokens for part in parts) / max(1, tokens) for name in ("mean", "kl"))
    return Mismatch(mean, max(part.maximum for part in parts), kl, tokens)


def staleness_kl(logprobs_T: Tensor, batch: Batch) -> float:
    """KL of the policy from the policies that sampled the stale tokens, by k3: 0 or more, in nats per token."""
    if batch.stale_T is None:
        return 0.0
    log = (logprobs_T - batch.engine_logprobs_T)[batch.trained_T & batch.stale_T].detach().double()
    log = log.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return float((log.exp() - 1 - log).mean()) if len(log) else 0.0


def compute_importance_weights(batch: Batch, settings: MismatchSettings) -> Tensor:
    """Computes the factor of each trained token's loss: 1 by default, a truncated ratio, or 0 if it is rejected.

    A rejected token still counts in the step's totals, so that the other tokens do not weigh more than before.
    """
    weights_T = batch.trained_T.to(batch.old_logprobs_T.dtype)
    if settings.reject:
        ratio_T = _compute_ratio(batch, settings.reject)
        weights_T = weights_T * ((ratio_T >= settings.low) & (ratio_T <= settings.high))
    if settings.truncate:
        weights_T = weights_T * _compute_ratio(batch, settings.truncate).clamp(max=settings.cap)
    return weights_T.detach()


def _compute_ratio(batch: Batch, level: str) -> Tensor:
    """Trainer over engine probability: of the token, of its sequence, or its sequence's geometric mean."""
    log_T = torch.where(batch.trained_T, batch.old_logprobs_T - batch.engine_logprobs_T, 0)
    if level == "sequence":
        log_T = batch.sum_by_sequence(log_T)[batch.sequence_T]
    elif level == "geometric":
        log_T = batch.mean_by_sequence(log_T, batch.trained_T)[batch.sequence_T]
    return log_T.exp()

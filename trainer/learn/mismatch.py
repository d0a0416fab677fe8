"""Engine and trainer are two programs for one policy: how far they differ is always known, and mended where asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.learn.algorithms.base import FAR
from trainer.learn.batch import Batch
from trainer.learn.settings import MismatchSettings


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's logprobs are from the engine's, over what is trained and not stale."""

    mean: float
    """Of |log trainer - log engine|."""
    most: float
    kl: float
    """Of the engine's policy from the trainer's, by k3: 0 or more, nats a token."""
    tokens: int

    def within(self, bound: float) -> bool:
        """No token is further off: the engine's logprobs may stand for the old policy's."""
        return self.tokens > 0 and self.most <= bound


def measure(batch: Batch) -> Mismatch:
    log = (batch.old_T - batch.engine_T)[batch.fresh_T].detach().double()
    if not len(log):
        return Mismatch(0.0, 0.0, 0.0, 0)
    kl = (log.clamp(-FAR, FAR).exp() - 1 - log).mean()
    return Mismatch(float(log.abs().mean()), float(log.abs().max()), float(kl), len(log))


def far(logprobs_T: Tensor, batch: Batch) -> float:
    """How far the policy is from those that sampled what is stale, by k3: 0 or more, nats a token."""
    if batch.stale_T is None:
        return 0.0
    log = (logprobs_T - batch.engine_T)[batch.trained_T & batch.stale_T].detach().double().clamp(-FAR, FAR)
    return float((log.exp() - 1 - log).mean()) if len(log) else 0.0


def factors(batch: Batch, settings: MismatchSettings) -> Tensor:
    """What each trained token's loss is multiplied with: 1 where nothing is asked for, 0 where it is rejected.

    A rejected token still counts in what a step divides by, so that the others weigh no more than they did.
    """
    factor_T = batch.trained_T.to(batch.old_T.dtype)
    if settings.reject:
        ratio_T = _ratio(batch, settings.reject)
        factor_T = factor_T * ((ratio_T >= settings.low) & (ratio_T <= settings.high))
    if settings.truncate:
        factor_T = factor_T * _ratio(batch, settings.truncate).clamp(max=settings.cap)
    return factor_T.detach()


def _ratio(batch: Batch, level: str) -> Tensor:
    """Trainer's over engine's likelihood: of the token, of its sequence, or its sequence's geometric mean."""
    log_T = torch.where(batch.trained_T, batch.old_T - batch.engine_T, 0)
    if level == "sequence":
        log_T = batch.total_S(log_T)[batch.sequence_T]
    elif level == "geometric":
        log_T = batch.mean_S(log_T, batch.trained_T)[batch.sequence_T]
    return log_T.exp()

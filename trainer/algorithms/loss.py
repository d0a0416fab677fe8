"""The policy loss (GRPO and the other algorithms) of a micro-batch: objective, mismatch correction, KL, aggregation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms import mismatch
from trainer.algorithms.aggregate import StepTotals, aggregate_loss
from trainer.algorithms.base import Clip, compute_log_ratio
from trainer.algorithms.kl import estimate_kl
from trainer.algorithms.packing import Batch, NotFiniteError
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.table import ALGORITHMS


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's part of the step's loss, with its metrics."""

    value: Tensor
    """Differentiable; the values of a step's micro-batches add up to the step's loss."""
    metrics: dict[str, float]
    """Means over this micro-batch's trained tokens; a name that ends in `max` is a maximum."""
    tokens: int
    """How many tokens are trained here: the weight of the means."""


def compute_loss(logprobs_T: Tensor, batch: Batch, totals: StepTotals, settings: AlgorithmSettings) -> Loss:
    """Computes the loss from the new policy's logprobs of the batch's ids."""
    if logprobs_T.shape != batch.ids_T.shape:
        raise ValueError(f"{len(batch.ids_T)} tokens with logprobs of shape {tuple(logprobs_T.shape)}")
    batch.check_finite("a new logprob of", logprobs_T.detach(), batch.trained_T)
    algorithm = ALGORITHMS[settings.name]
    objective = algorithm.objective(logprobs_T, batch, resolve_clip(settings))
    weights_T = mismatch.compute_importance_weights(batch, settings.mismatch)
    losses_T = objective.losses_T * weights_T
    metrics = _compute_metrics(logprobs_T, objective.clipped_T, weights_T, batch)
    if settings.kl.coefficient and settings.kl.place == "loss":
        kl_T = estimate_kl(logprobs_T, batch, settings.kl.estimator)
        losses_T = losses_T + settings.kl.coefficient * kl_T
        metrics["kl/reference"] = _trained_mean(kl_T, batch)
    batch.check_finite("a loss of", losses_T.detach(), batch.trained_T)
    value = aggregate_loss(losses_T, batch, settings.aggregate or algorithm.aggregate, totals, settings.length)
    if not bool(value.isfinite()):
        raise NotFiniteError(f"the loss is {float(value)}: each token's loss is finite, but their sum overflows")
    return Loss(value, metrics, int(batch.trained_T.sum()))


def resolve_clip(settings: AlgorithmSettings) -> Clip:
    """The algorithm's clip, with the bounds that settings override."""
    default = ALGORITHMS[settings.name].clip
    low = default.low if settings.clip_low is None else settings.clip_low
    high = default.high if settings.clip_high is None else settings.clip_high
    return Clip(low, high, settings.clip_dual)


def _trained_mean(values_T: Tensor, batch: Batch) -> float:
    trained = values_T.detach()[batch.trained_T]
    return float(trained.mean()) if len(trained) else 0.0


def _compute_metrics(logprobs_T: Tensor, clipped_T: Tensor, weights_T: Tensor, batch: Batch) -> dict[str, float]:
    log_T = compute_log_ratio(logprobs_T.detach(), batch)
    measured = mismatch.measure_mismatch(batch)
    metrics = {"mismatch/mean": measured.mean, "mismatch/max": measured.maximum, "mismatch/kl": measured.kl}
    if batch.stale_T is not None:
        metrics = (metrics if measured.tokens else {}) | {"staleness/kl": mismatch.staleness_kl(logprobs_T, batch)}
    return metrics | {
        "clipped": _trained_mean(clipped_T.to(log_T.dtype), batch),
        "kl/old": _trained_mean(torch.expm1(log_T) - log_T, batch),
        "mismatch/factor": _trained_mean(weights_T, batch),
        "mismatch/rejected": _trained_mean((weights_T == 0).to(log_T.dtype), batch),
    }

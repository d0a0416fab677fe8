"""The loss of a micro-batch: the algorithm's objective, the mismatch mended, the KL term, and one sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.learn import mismatch
from trainer.learn.aggregate import Totals, aggregate
from trainer.learn.algorithms import NAMES, Clip
from trainer.learn.algorithms.base import log_ratio
from trainer.learn.batch import Batch
from trainer.learn.finite import NotFinite
from trainer.learn.kl import distance
from trainer.learn.settings import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class Loss:
    value: Tensor
    """To be differentiated; those of a step's micro-batches add up."""
    metrics: dict[str, float]
    """Means over this micro-batch's trained tokens; what ends in `max` is a largest one."""
    tokens: int
    """Trained here: what means are weighed with."""


def loss(logprobs_T: Tensor, batch: Batch, totals: Totals, settings: AlgorithmSettings) -> Loss:
    """What to minimise, given the new policy's logprobs of the batch's ids."""
    if logprobs_T.shape != batch.ids_T.shape:
        raise ValueError(f"{len(batch.ids_T)} tokens with logprobs of shape {tuple(logprobs_T.shape)}")
    batch.finite("a new logprob of", logprobs_T.detach(), batch.trained_T)
    algorithm = NAMES[settings.name]
    objective = algorithm.objective(logprobs_T, batch, bounds(settings))
    factor_T = mismatch.factors(batch, settings.mismatch)
    losses_T = objective.losses_T * factor_T
    metrics = _measured(logprobs_T, objective.clipped_T, factor_T, batch)
    if settings.kl.coefficient and settings.kl.place == "loss":
        distances_T = distance(logprobs_T, batch, settings.kl.estimator)
        losses_T = losses_T + settings.kl.coefficient * distances_T
        metrics["kl/reference"] = _mean(distances_T, batch)
    batch.finite("a loss of", losses_T.detach(), batch.trained_T)
    value = aggregate(losses_T, batch, settings.aggregate or algorithm.aggregate, totals, settings.length)
    if not bool(value.isfinite()):
        raise NotFinite(f"the loss is {float(value)}, though each token's is a number: they are too large to be summed")
    return Loss(value, metrics, int(batch.trained_T.sum()))


def bounds(settings: AlgorithmSettings) -> Clip:
    """The algorithm's own clip, but for what is set."""
    own = NAMES[settings.name].clip
    low = own.low if settings.clip_low is None else settings.clip_low
    high = own.high if settings.clip_high is None else settings.clip_high
    return Clip(low, high, settings.clip_dual)


def _mean(values_T: Tensor, batch: Batch) -> float:
    trained = values_T.detach()[batch.trained_T]
    return float(trained.mean()) if len(trained) else 0.0


def _measured(logprobs_T: Tensor, clipped_T: Tensor, factor_T: Tensor, batch: Batch) -> dict[str, float]:
    log_T = log_ratio(logprobs_T.detach(), batch)
    seen = mismatch.measure(batch)
    apart = {"mismatch/mean": seen.mean, "mismatch/max": seen.most, "mismatch/kl": seen.kl}
    if batch.stale_T is not None:
        apart = (apart if seen.tokens else {}) | {"staleness/kl": mismatch.far(logprobs_T, batch)}
    return apart | {
        "clipped": _mean(clipped_T.to(log_T.dtype), batch),
        "kl/old": _mean(torch.expm1(log_T) - log_T, batch),
        "mismatch/factor": _mean(factor_T, batch),
        "mismatch/rejected": _mean((factor_T == 0).to(log_T.dtype), batch),
    }

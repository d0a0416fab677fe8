"""The loss of a batch: the objective's token losses, corrected for the engine's mismatch, with KL, aggregated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from trainer.algorithms.named_algorithms import ALGORITHMS, MAX_LOG_RATIO, Clip, compute_log_ratio
from trainer.algorithms.packing import Batch, NotFiniteError
from trainer.algorithms.settings import Aggregation, AlgorithmSettings, Estimator, MismatchSettings


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a step's loss is divided by, computed over all its micro-batches before the first backward pass."""

    weight: float
    """The weights of all trained tokens together."""
    rollouts: int
    """How many rollouts have a trained token, or all of them (`count_untrained`). One of several ledgers counts once,
    however its tokens are split."""


def aggregate_loss(losses_T: Tensor, batch: Batch, kind: Aggregation | float, totals: StepTotals) -> Tensor:
    """Computes this micro-batch's part of the step's loss; the parts of all micro-batches add up to it."""
    weighted_T = torch.where(batch.trained_T, batch.weights_T * losses_T, 0)
    if kind == "token":
        return weighted_T.sum() / totals.weight
    if not isinstance(kind, str):
        return weighted_T.sum() / (totals.rollouts * kind)
    weight_S = batch.sum_by_sequence(batch.weights_T) if batch.rollout_weight_S is None else batch.rollout_weight_S
    mean_S = batch.sum_by_sequence(weighted_T) / torch.where(weight_S > 0, weight_S, 1)
    return mean_S.sum() / totals.rollouts


def estimate_kl(logprobs_T: Tensor, batch: Batch, estimator: Estimator) -> Tensor:
    """Estimates the KL of each trained token; 0 elsewhere."""
    if batch.ref_logprobs_T is None:
        raise ValueError("a KL term needs the reference policy's logprobs, and the batch has none")
    log_T = torch.where(batch.trained_T, batch.ref_logprobs_T - logprobs_T, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k2":
        return log_T**2 / 2
    value_T = -log_T if estimator.startswith("k1") else log_T.exp() - 1 - log_T
    if not estimator.endswith("+"):
        return value_T
    gradient_T = log_T**2 / 2
    return value_T.detach() + gradient_T - gradient_T.detach()


MIN_REST = 1e-6
"""The least probability of all other tokens together: what rounding leaves of it."""


def compute_top_kl(logprobs_TK: Tensor, batch: Batch) -> Tensor:
    """The KL of each trained token's distribution from the reference's, over the reference's most likely tokens and all
    others as one: at most the whole KL, and equal to it if there are no others; 0 elsewhere."""
    if batch.ref_top is None:
        raise ValueError("the KL over the reference's most likely tokens needs those, and the batch has none")
    reference_TK = batch.ref_top.logprobs_TK.to(logprobs_TK.device)
    logprobs_TK = logprobs_TK.clamp(min=torch.finfo(logprobs_TK.dtype).min)  # What has no mass adds none.
    is_token_TK = batch.trained_T[:, None] & (reference_TK > -inf)
    log_TK, reference_TK = (torch.where(is_token_TK, values, 0) for values in (logprobs_TK, reference_TK))
    mass_TK, reference_mass_TK = (torch.where(is_token_TK, values.exp(), 0) for values in (log_TK, reference_TK))
    rest_T, reference_rest_T = ((1 - mass.sum(-1)).clamp(min=MIN_REST) for mass in (mass_TK, reference_mass_TK))
    kl_T = (mass_TK * (log_TK - reference_TK)).sum(-1) + rest_T * (rest_T / reference_rest_T).log()
    return torch.where(batch.trained_T, kl_T, 0)


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
    mean, maximum, kl = torch.stack(_compute_mismatch(batch)).tolist()  # Waits for a GPU once.
    return Mismatch(mean, maximum, kl, len(batch.fresh_K))


def _compute_mismatch(batch: Batch) -> list[Tensor]:
    """The mean, the maximum and the KL of a mismatch; 0 without fresh tokens."""
    log_K = (batch.old_logprobs_T - batch.engine_logprobs_T)[batch.fresh_K].detach().double()
    if not len(log_K):
        return [log_K.sum()] * 3
    kl_K = log_K.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 - log_K
    return [log_K.abs().mean(), log_K.abs().max(), kl_K.mean()]


def merge_mismatches(parts: Sequence[Mismatch]) -> Mismatch:
    """The mismatch of several batches together."""
    tokens = sum(part.tokens for part in parts)
    mean, kl = (sum(getattr(part, name) * part.tokens for part in parts) / max(1, tokens) for name in ("mean", "kl"))
    return Mismatch(mean, max(part.maximum for part in parts), kl, tokens)


def staleness_kl(logprobs_T: Tensor, batch: Batch, stale_T: Tensor) -> Tensor:
    """KL of the policy from the policies that sampled the stale tokens, by k3: 0 or more, in nats per token."""
    log_T = torch.where(batch.trained_T & stale_T, logprobs_T.detach() - batch.engine_logprobs_T, 0).double()
    log_T = log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_T.exp() - 1 - log_T).sum() / max(1, len(batch.trained_K) - len(batch.fresh_K))


MAX_UNCORRECTED = 1e-3
"""In nats. Where logprobs of engine and trainer differ by no more in the mean, as float32 roundings do, weights are as
good as 1; bfloat16 is above it."""


def compute_importance_weights(batch: Batch, settings: MismatchSettings) -> Tensor:
    """Computes the factor of each trained token's loss: 1, a truncated ratio, or 0 if it is rejected.

    A rejected token still counts in the step's totals, so that the other tokens do not weigh more than before.
    """
    weights_T = batch.trained_T.to(batch.old_logprobs_T.dtype)
    if settings.reject:
        ratio_T, (low, high) = _compute_ratio(batch, settings.reject), settings.bounds
        weights_T = weights_T * ((ratio_T >= low) & (ratio_T <= high))
    if settings.truncate in ("token", "sequence"):
        weights_T = weights_T * _compute_ratio(batch, settings.truncate).clamp(max=settings.cap)
    elif settings.truncate == "auto" and not settings.reject:
        # By sequence, since a step's rows may be dealt in any way to micro-batches and ranks.
        difference_T = (batch.old_logprobs_T - batch.engine_logprobs_T).abs()
        is_far_S = batch.mean_by_sequence(difference_T, batch.fresh_T) > MAX_UNCORRECTED
        ratio_T = _compute_ratio(batch, "token").clamp(max=settings.cap)
        weights_T = torch.where(is_far_S[batch.sequence_T], weights_T * ratio_T, weights_T)
    return weights_T.detach()


def _compute_ratio(batch: Batch, level: str) -> Tensor:
    """Trainer over engine probability: of the token, of its sequence, or its sequence's geometric mean."""
    log_T = torch.where(batch.trained_T, batch.old_logprobs_T - batch.engine_logprobs_T, 0)
    if level == "sequence":
        log_T = batch.sum_by_sequence(log_T)[batch.sequence_T]
    elif level == "geometric":
        log_T = batch.mean_by_sequence(log_T, batch.trained_T)[batch.sequence_T]
    return log_T.exp()


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's part of the step's loss, with its metrics."""

    value: Tensor
    """Differentiable; the values of a step's micro-batches add up to the step's loss."""
    numbers: Mapping[str, Tensor]
    """Means over this micro-batch's trained tokens; a name that ends in `max` is a maximum."""
    tokens: int
    """How many tokens are trained here: the weight of the means."""
    batch: Batch
    checked: Mapping[str, Tensor]
    """What has to be finite at each of them, by its name in error messages."""


def read_losses(losses: Sequence[Loss]) -> list[dict[str, float]]:
    """The numbers of losses. Waits once for a GPU, which is idle after each wait. Raises NotFiniteError for the first
    loss that is not finite."""
    tensors = []
    for loss in losses:
        checked_NK = torch.stack([*loss.checked.values()])[:, loss.batch.trained_K]
        tensors += [checked_NK.isfinite().all() & loss.value.isfinite(), *loss.numbers.values()]
    numbers = iter(torch.stack([tensor.double() for tensor in tensors]).tolist())
    metrics = []
    for loss in losses:
        if not next(numbers):
            for what, values_T in loss.checked.items():
                loss.batch.check_finite(what, values_T, loss.batch.trained_T)
            problem = f"the loss is {float(loss.value)}: each token's loss is finite, but their sum overflows"
            raise NotFiniteError(problem)
        metrics.append({name: next(numbers) for name in loss.numbers})
    return metrics


def compute_loss(
    logprobs_T: Tensor,
    batch: Batch,
    totals: StepTotals,
    settings: AlgorithmSettings,
    entropy_T: Tensor | None = None,
    top_TK: Tensor | None = None,
) -> Loss:
    """Computes the loss from the new policy's logprobs of the batch's ids, its entropies for a bonus, and its logprobs
    of the reference's most likely tokens. Numbers that are not finite are found when the loss is read."""
    if logprobs_T.shape != batch.ids_T.shape:
        raise ValueError(f"{len(batch.ids_T)} tokens with logprobs of shape {tuple(logprobs_T.shape)}")
    algorithm = ALGORITHMS[settings.name]
    objective = algorithm.objective(logprobs_T, batch, resolve_clip(settings))
    losses_T, numbers = objective.losses_T, {}
    factor_T: Tensor | float = 1.0
    if not algorithm.is_supervised:
        weights_T = compute_importance_weights(batch, settings.mismatch)
        losses_T = losses_T * weights_T
        numbers = _compute_metrics(logprobs_T, objective.clipped_T, weights_T, batch)
        factor_T = _kl_factor(logprobs_T, weights_T, batch, settings)
    if settings.kl.coefficient and not settings.kl.in_reward:
        if top_TK is None:
            kl_T = factor_T * estimate_kl(logprobs_T, batch, settings.kl.estimator)
        else:
            kl_T = torch.where(weights_T > 0, compute_top_kl(top_TK, batch), 0)  # Rejected tokens have no weight.
        losses_T = losses_T + settings.kl.coefficient * kl_T
        numbers |= _trained_means(batch, {"kl/reference": kl_T})
    if settings.entropy_coefficient:
        if entropy_T is None:
            raise ValueError("an entropy bonus needs the entropies")
        losses_T = losses_T - settings.entropy_coefficient * torch.where(batch.trained_T, entropy_T, 0)
    value = aggregate_loss(losses_T, batch, settings.aggregate or algorithm.aggregate, totals)
    checked = {"a new logprob of": logprobs_T.detach(), "a loss of": losses_T.detach()}
    return Loss(value, numbers, len(batch.trained_K), batch, checked)


def _kl_factor(logprobs_T: Tensor, weights_T: Tensor, batch: Batch, settings: AlgorithmSettings) -> Tensor | float:
    """By what the KL of each token is multiplied, so that it is that of the new policy, whoever sampled."""
    if not settings.kl.estimator.endswith("+") or settings.kl.importance == "none":
        return 1.0
    ratio_T = compute_log_ratio(logprobs_T.detach(), batch).exp()
    return ratio_T if settings.kl.importance == "policy" else weights_T * ratio_T.clamp(max=settings.mismatch.cap)


def resolve_clip(settings: AlgorithmSettings) -> Clip:
    """The algorithm's clip, with the bounds that settings override."""
    default = ALGORITHMS[settings.name].clip
    low = default.low if settings.clip_low is None else settings.clip_low
    high = default.high if settings.clip_high is None else settings.clip_high
    return Clip(low, high, settings.clip_dual)


def _trained_means(batch: Batch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means over the trained tokens; 0 without any."""
    trained_NK = torch.stack([values_T.detach() for values_T in values.values()])[:, batch.trained_K]
    means_N = trained_NK.mean(-1) if trained_NK.shape[1] else trained_NK.sum(-1)
    return dict(zip(values, means_N.unbind(), strict=True))


def _compute_metrics(logprobs_T: Tensor, clipped_T: Tensor, weights_T: Tensor, batch: Batch) -> dict[str, Tensor]:
    log_T = compute_log_ratio(logprobs_T.detach(), batch)
    names = ("mismatch/mean", "mismatch/max", "mismatch/kl")
    metrics = dict(zip(names, _compute_mismatch(batch), strict=True))
    if batch.stale_T is not None:
        metrics = metrics if len(batch.fresh_K) else {}
        metrics["staleness/kl"] = staleness_kl(logprobs_T, batch, batch.stale_T)
    measures = {
        "clipped": clipped_T.to(log_T.dtype),
        "kl/old": torch.expm1(log_T) - log_T,
        "mismatch/factor": weights_T,
        "mismatch/rejected": (weights_T == 0).to(log_T.dtype),
    }
    return metrics | _trained_means(batch, measures)

"""Tests the KL estimators against the exact KL, which is a sum over a small vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithms import reference_loops
from tests.trainer.algorithms.reference_loops import step_totals
from trainer.algorithms.loss import compute_loss, estimate_kl, read_losses
from trainer.algorithms.packing import Batch, BatchRow, pack
from trainer.algorithms.settings import AlgorithmSettings, Estimator, KLSettings, MismatchSettings

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.5, -0.6], dtype=torch.float64).log_softmax(0)


def every_token(new_V: Tensor) -> Batch:
    """One sequence with each token once, so that a mean weighted by probability is an expectation."""
    row = BatchRow("t/0", [9, 0, 1, 2, 3], [False] + [True] * 4, [0.0] * 5, [0.0] * 5, [0.0] + [1.0] * 4)
    start = torch.zeros(1, dtype=torch.float64)
    old_T = torch.cat([start, new_V.detach()])
    return replace(
        pack([row]), old_logprobs_T=old_T, engine_logprobs_T=old_T, ref_logprobs_T=torch.cat([start, REFERENCE])
    )


def expected_kl(estimator: Estimator) -> tuple[Tensor, Tensor]:
    """The expectation of the estimator under the new policy, and its gradient with respect to the logits."""
    leaf = LOGITS.clone().requires_grad_()
    new_V = leaf.log_softmax(0)
    values_V = estimate_kl(torch.cat([torch.zeros(1), new_V]), every_token(new_V), estimator)[1:]
    mean = (new_V.detach().exp() * values_V).sum()
    return mean.detach(), torch.autograd.grad(mean, leaf)[0]


def exact_kl(reverse: bool = False) -> tuple[Tensor, Tensor]:
    leaf = LOGITS.clone().requires_grad_()
    new_V = leaf.log_softmax(0)
    value = (REFERENCE.exp() * (REFERENCE - new_V)).sum() if reverse else (new_V.exp() * (new_V - REFERENCE)).sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_gradient_of_k2_and_straight_through_estimators_is_unbiased(estimator: Estimator) -> None:
    torch.testing.assert_close(expected_kl(estimator)[1], exact_kl()[1])


def test_gradient_of_k1_is_zero_and_of_k3_that_of_the_reverse_kl() -> None:
    torch.testing.assert_close(expected_kl("k1")[1], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(expected_kl("k3")[1], exact_kl(reverse=True)[1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_estimators_equal_their_formulas(estimator: Estimator) -> None:
    example = reference_loops.make_batch(4)
    estimates = iter(estimate_kl(example.logprobs(), example.batch(), estimator).tolist())
    for row, new, ref in zip(example.rows, example.new, example.ref, strict=True):
        for token, weight in enumerate(row.weights):
            d = ref[token] - new[token]
            formula = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator.rstrip("+")]
            assert next(estimates) == pytest.approx(formula if weight else 0.0, abs=1e-12)


def test_kl_term_is_added_to_the_loss() -> None:
    example = reference_loops.make_batch(2)
    batch, totals, leaf = example.batch(), step_totals(example.batch()), example.logprobs()
    uncorrected = AlgorithmSettings(aggregate="token", mismatch=MismatchSettings(truncate="never"))
    with_kl = uncorrected.model_copy(update={"kl": KLSettings(coefficient=0.5, estimator="k2")})
    with_it, without = (compute_loss(leaf, batch, totals, settings) for settings in (with_kl, uncorrected))
    kl_T = estimate_kl(leaf, batch, "k2").detach()
    cost = float((batch.weights_T * kl_T).sum() / batch.weights_T.sum())
    assert (with_it.value - without.value).item() == pytest.approx(0.5 * cost)
    assert read_losses([with_it])[0]["kl/reference"] == pytest.approx(float(kl_T.sum() / batch.trained_T.sum()))
    in_the_reward = uncorrected.model_copy(update={"kl": KLSettings(coefficient=0.5, in_reward=True)})
    assert torch.equal(compute_loss(leaf, batch, totals, in_the_reward).value, without.value)


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
@pytest.mark.parametrize("by_engine", [False, True])
def test_kl_in_the_loss_is_that_of_the_new_policy_whoever_sampled(estimator: Estimator, by_engine: bool) -> None:
    """Tokens of an older policy, and of an engine that samples from another one, count by their importance ratio."""
    leaf = LOGITS.clone().requires_grad_()
    new_V = leaf.log_softmax(0)
    sampled_V = (LOGITS + torch.tensor([0.2, 0.1, -0.2, -0.1])).log_softmax(0)
    batch = every_token(new_V)
    engine_T = torch.cat([torch.zeros(1), sampled_V])
    old_T = torch.cat([torch.zeros(1), (new_V.detach() + sampled_V) / 2]) if by_engine else engine_T
    weights_T = torch.cat([torch.zeros(1), sampled_V.exp()])
    batch = replace(batch, weights_T=weights_T, old_logprobs_T=old_T, engine_logprobs_T=engine_T)
    settings = AlgorithmSettings(
        aggregate="token",
        kl=KLSettings(coefficient=1.0, estimator=estimator),
        mismatch=MismatchSettings(truncate="token"),
    )
    logprobs_T = torch.cat([torch.zeros(1), new_V])
    compute_loss(logprobs_T, batch, step_totals(batch), settings).value.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(leaf.grad, exact_kl()[1])


@pytest.mark.parametrize("importance", ["engine", "policy", "none"])
def test_kl_of_tokens_of_an_older_policy_has_the_factor_that_is_set(importance: Any) -> None:
    example, cap = reference_loops.make_batch(4), 1.05
    batch, logprobs_T = example.batch(), example.logprobs().detach()
    trained_T, log_T = batch.trained_T, logprobs_T - batch.old_logprobs_T
    weight_T = (batch.old_logprobs_T - batch.engine_logprobs_T).exp().clamp(max=cap)
    capped_T = weight_T * log_T.exp().clamp(max=cap)
    factor_T = {"engine": capped_T, "policy": log_T.exp(), "none": torch.ones_like(log_T)}[importance]
    assert float(log_T[trained_T].exp().max()) > cap and float(weight_T[trained_T].min()) < 1
    settings = AlgorithmSettings(
        kl=KLSettings(coefficient=1.0, estimator="k3+", importance=importance),
        mismatch=MismatchSettings(truncate="token", cap=cap),
    )
    found = read_losses([compute_loss(logprobs_T, batch, step_totals(batch), settings)])[0]["kl/reference"]
    expected_T = (factor_T * estimate_kl(logprobs_T, batch, "k3+"))[trained_T]
    assert found == pytest.approx(float(expected_T.mean()))


def test_kl_without_reference_logprobs_raises() -> None:
    batch = replace(reference_loops.make_batch(0).batch(), ref_logprobs_T=None)
    with pytest.raises(ValueError, match="needs the reference policy's logprobs"):
        estimate_kl(batch.old_logprobs_T, batch, "k3")

"""Tests the KL estimators against the exact KL, and the mismatch of engine and trainer against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithms import reference_loops
from tests.trainer.algorithms.reference_loops import ListBatch, step_totals
from trainer.algorithms.loss import compute_importance_weights, compute_loss, estimate_kl, measure_mismatch, read_losses
from trainer.algorithms.packing import Batch, BatchRow, TopLogprobs, pack
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


def log_ratios(example: reference_loops.ListBatch) -> list[dict[int, float]]:
    """The log ratio of trainer to engine for each trained token of each sequence."""
    return [
        {token: old[token] - row.engine_logprobs[token] for token in reference_loops.trained_tokens(row)}
        for row, old in zip(example.rows, example.old, strict=True)
    ]


def test_measured_mismatch_equals_loops() -> None:
    example = reference_loops.make_batch(3)
    measured = measure_mismatch(example.batch())
    differences = [value for of_sequence in log_ratios(example) for value in of_sequence.values()]
    assert measured.tokens == len(differences)
    assert measured.mean == pytest.approx(sum(map(abs, differences)) / len(differences), rel=1e-5)
    assert measured.maximum == pytest.approx(max(map(abs, differences)), rel=1e-5)
    assert measured.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / len(differences), rel=1e-4)


def ratio(of_sequence: dict[int, float], token: int, level: str) -> float:
    if level == "token":
        return math.exp(of_sequence[token])
    total = sum(of_sequence.values())
    return math.exp(total if level == "sequence" else total / len(of_sequence))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_ratios_truncated_at_the_cap(level: str) -> None:
    for seed in range(5):
        example = reference_loops.make_batch(seed, spread=0.6)
        weights = iter(compute_importance_weights(example.batch(), MismatchSettings(truncate=level, cap=1.3)).tolist())
        for row, of_sequence in zip(example.rows, log_ratios(example), strict=True):
            for token in range(len(row.ids)):
                expected = min(ratio(of_sequence, token, level), 1.3) if token in of_sequence else 0.0
                assert next(weights) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_out_of_bounds_are_rejected(level: str) -> None:
    rejected = kept = 0
    for seed in range(5):
        example = reference_loops.make_batch(seed, spread=0.6)
        weights = iter(
            compute_importance_weights(example.batch(), MismatchSettings(reject=level, bounds=(0.8, 1.3))).tolist()
        )
        for row, of_sequence in zip(example.rows, log_ratios(example), strict=True):
            for token in range(len(row.ids)):
                inside = token in of_sequence and 0.8 <= ratio(of_sequence, token, level) <= 1.3
                assert next(weights) == float(inside)
                kept, rejected = kept + inside, rejected + (token in of_sequence and not inside)
    assert kept and rejected


def test_loss_is_weighted_by_token_and_reported() -> None:
    example = reference_loops.make_batch(6, spread=0.7)
    batch, totals, leaf = example.batch(), step_totals(example.batch()), example.logprobs()
    settings = MismatchSettings(truncate="token", cap=1.2, reject="token", bounds=(0.7, 1.6))
    corrected = compute_loss(leaf, batch, totals, AlgorithmSettings(mismatch=settings, aggregate="token"))
    uncorrected = MismatchSettings(truncate="never")
    plain = compute_loss(leaf, batch, totals, AlgorithmSettings(mismatch=uncorrected, aggregate="token"))
    weights_T = compute_importance_weights(batch, settings)
    (gradient,) = torch.autograd.grad(plain.value, leaf)
    torch.testing.assert_close(torch.autograd.grad(corrected.value, leaf)[0], gradient * weights_T)
    trained, (metrics, plain_metrics) = batch.trained_T, read_losses([corrected, plain])
    assert metrics["mismatch/rejected"] == pytest.approx(float((weights_T[trained] == 0).double().mean()))
    assert metrics["mismatch/factor"] == pytest.approx(float(weights_T[trained].mean()))
    assert plain_metrics["mismatch/max"] == metrics["mismatch/max"] == measure_mismatch(batch).maximum


@pytest.mark.parametrize(("off", "is_corrected"), [(0.0, False), (5e-4, False), (5e-3, True), (-5e-3, True)])
def test_mismatch_is_corrected_by_default_where_it_is_measured(off: float, is_corrected: bool) -> None:
    batch = reference_loops.make_batch(1).batch()
    batch = replace(batch, engine_logprobs_T=batch.old_logprobs_T - off)
    by_default = compute_importance_weights(batch, MismatchSettings())
    by_token = compute_importance_weights(batch, MismatchSettings(truncate="token"))
    assert torch.equal(by_default, by_token if is_corrected else batch.trained_T.to(by_token.dtype))


def test_correction_of_a_sequence_does_not_depend_on_the_rows_beside_it() -> None:
    near, far = reference_loops.make_batch(2, spread=1e-4), reference_loops.make_batch(3, spread=1e-2)
    together = ListBatch(near.rows + far.rows, near.new + far.new, near.old + far.old, near.ref + far.ref)
    apart = [compute_importance_weights(example.batch(), MismatchSettings()) for example in (near, far)]
    assert torch.equal(compute_importance_weights(together.batch(), MismatchSettings()), torch.cat(apart))
    assert apart[0].unique().numel() == 2 < apart[1].unique().numel()


def test_stale_tokens_do_not_decide_whether_the_engine_is_corrected() -> None:
    batch = reference_loops.make_batch(1).batch()
    first = batch.trained_T & (batch.trained_T.cumsum(0) == 1)
    far = torch.where(first, batch.old_logprobs_T - 5.0, batch.old_logprobs_T)
    assert compute_importance_weights(replace(batch, engine_logprobs_T=far), MismatchSettings()).max() == 2.0
    stale = replace(batch, engine_logprobs_T=far, stale_T=first)
    assert compute_importance_weights(stale, MismatchSettings()).max() == 1.0


def test_engine_is_exact_only_if_every_token_is_within_the_bound() -> None:
    batch = reference_loops.make_batch(1).batch()
    token = int(batch.trained_T.nonzero()[-1])
    off = torch.zeros_like(batch.old_logprobs_T)
    off[token] = 1e-3
    assert measure_mismatch(replace(batch, old_logprobs_T=batch.engine_logprobs_T)).is_within(0.0)
    assert not measure_mismatch(replace(batch, old_logprobs_T=batch.engine_logprobs_T + off)).is_within(1e-4)
    untrained = replace(batch, weights_T=torch.zeros_like(batch.weights_T))
    assert measure_mismatch(untrained).tokens == 0 and not measure_mismatch(untrained).is_within(1.0)


def test_kl_over_likely_tokens_leaves_rejected_tokens_out_and_impossible_ones_without_effect() -> None:
    batch = reference_loops.make_batch(6, spread=0.7).batch()
    many = len(batch.ids_T)
    top = TopLogprobs(torch.zeros(many, 2).int(), torch.tensor([[0.5, 0.3]]).log().repeat(many, 1))
    settings = AlgorithmSettings.model_validate(
        {"kl": {"coefficient": 1, "top_k": 2}, "mismatch": {"reject": "token", "bounds": (0.8, 1.3)}}
    )
    new_TK = torch.tensor([[0.2, 0.0]]).log().repeat(many, 1).requires_grad_()
    batch = batch.with_ref_top(top)
    compute_loss(batch.old_logprobs_T, batch, step_totals(batch), settings, top_TK=new_TK).value.backward()
    rejected_T = batch.trained_T & (compute_importance_weights(batch, settings.mismatch) == 0)
    assert rejected_T.any() and new_TK.grad is not None and new_TK.grad.isfinite().all()
    assert (new_TK.grad[:, 0] != 0).equal(batch.trained_T & ~rejected_T)

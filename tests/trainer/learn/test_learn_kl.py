"""Estimators of a distance, held against the distance itself: a policy over a few tokens can be summed over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.learn import slow
from trainer.learn.aggregate import Totals
from trainer.learn.batch import Batch, Row, pack
from trainer.learn.kl import distance
from trainer.learn.loss import loss
from trainer.learn.settings import AlgorithmSettings, Estimator, KLSettings

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.4, 0.5, -0.6], dtype=torch.float64).log_softmax(0)


def every_token(new_V: Tensor) -> Batch:
    """One sequence that holds each token once, so that a mean weighted by likelihood is an expectation."""
    row = Row("t/0", [9, 0, 1, 2, 3], [False] + [True] * 4, [0.0] * 5, [0.0] * 5, [0.0] + [1.0] * 4)
    start = torch.zeros(1, dtype=torch.float64)
    old_T = torch.cat([start, new_V.detach()])
    return replace(pack([row]), old_T=old_T, engine_T=old_T, ref_T=torch.cat([start, REFERENCE]))


def on_average(estimator: Estimator) -> tuple[Tensor, Tensor]:
    """The mean over what the new policy samples, and its pull on the logits where each is sampled as it is."""
    leaf = LOGITS.clone().requires_grad_()
    new_V = leaf.log_softmax(0)
    values_V = distance(torch.cat([torch.zeros(1), new_V]), every_token(new_V), estimator)[1:]
    mean = (new_V.detach().exp() * values_V).sum()
    return mean.detach(), torch.autograd.grad(mean, leaf)[0]


def truth(backwards: bool = False) -> tuple[Tensor, Tensor]:
    leaf = LOGITS.clone().requires_grad_()
    new_V = leaf.log_softmax(0)
    value = (REFERENCE.exp() * (REFERENCE - new_V)).sum() if backwards else (new_V.exp() * (new_V - REFERENCE)).sum()
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_an_estimator_is_right_on_average(estimator: Estimator) -> None:
    torch.testing.assert_close(on_average(estimator)[0], truth()[0])


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
def test_k2_and_the_straight_through_ones_pull_as_the_true_distance_does(estimator: Estimator) -> None:
    torch.testing.assert_close(on_average(estimator)[1], truth()[1])


def test_k1_pulls_nowhere_on_average_and_k3_the_other_way_round() -> None:
    torch.testing.assert_close(on_average("k1")[1], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(on_average("k3")[1], truth(backwards=True)[1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_each_estimator_is_its_formula_and_nothing_where_nothing_is_trained(estimator: Estimator) -> None:
    made = slow.make(4)
    found = iter(distance(made.logprobs(), made.batch(), estimator).tolist())
    for row, new, ref in zip(made.rows, made.new, made.ref, strict=True):
        for token, weight in enumerate(row.weights):
            d = ref[token] - new[token]
            formula = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator.rstrip("+")]
            assert next(found) == pytest.approx(formula if weight else 0.0, abs=1e-12)


def test_at_the_reference_there_is_neither_distance_nor_pull() -> None:
    batch = slow.make(1).batch()
    for estimator in ("k2", "k3", "k3+"):
        leaf = batch.ref_T.clone().requires_grad_()
        values = distance(leaf, batch, estimator)
        assert not values.any() and not torch.autograd.grad(values.sum(), leaf)[0].any()


def test_in_the_loss_it_stands_beside_the_objective() -> None:
    made = slow.make(2)
    batch, totals, leaf = made.batch(), Totals.of([made.batch()]), made.logprobs()
    asked = AlgorithmSettings(kl=KLSettings(coefficient=0.5, estimator="k2"), aggregate="token")
    with_it, without = (loss(leaf, batch, totals, each) for each in (asked, AlgorithmSettings(aggregate="token")))
    far_T = distance(leaf, batch, "k2").detach()
    cost = float((batch.weights_T * far_T).sum() / batch.weights_T.sum())
    assert (with_it.value - without.value).item() == pytest.approx(0.5 * cost)
    assert with_it.metrics["kl/reference"] == pytest.approx(float(far_T.sum() / batch.trained_T.sum()))
    in_the_reward = AlgorithmSettings(kl=KLSettings(coefficient=0.5, place="reward"), aggregate="token")
    assert torch.equal(loss(leaf, batch, totals, in_the_reward).value, without.value)


def test_a_distance_without_a_reference_is_refused() -> None:
    batch = replace(slow.make(0).batch(), ref_T=None)
    with pytest.raises(ValueError, match="needs the reference policy's logprobs"):
        distance(batch.old_T, batch, "k3")

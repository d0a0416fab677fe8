"""Tests each algorithm's objective and gradient against loops, and properties that all of them have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.algorithms import reference_loops
from tests.trainer.algorithms.reference_loops import step_totals
from trainer.algorithms.loss import compute_loss, read_losses, resolve_clip
from trainer.algorithms.named_algorithms import ALGORITHMS, Clip, clip_objective
from trainer.algorithms.packing import Batch
from trainer.algorithms.settings import AlgorithmSettings, KLSettings, MismatchSettings, Name

ALL = sorted(ALGORITHMS)
seeds = st.integers(0, 10_000)

UNCORRECTED = MismatchSettings(truncate="never")


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def step(logprobs_T: Tensor, batch: Batch, settings: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """The loss and its gradient."""
    leaf = logprobs_T.detach().clone().requires_grad_()
    value = compute_loss(leaf, batch, step_totals(batch), settings).value
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient_equal_loops(name: Name, aggregation: str) -> None:
    for seed in range(8):
        example = reference_loops.make_batch(seed)
        settings = AlgorithmSettings(
            name=name, aggregate=7 if aggregation == "constant" else aggregation, mismatch=UNCORRECTED
        )
        clip = resolve_clip(settings)
        value, gradient = step(example.logprobs(), example.batch(), settings)
        expected = reference_loops.aggregate_losses(
            reference_loops.token_losses(name, example, clip.low, clip.high), example.rows, aggregation, 7
        )
        assert float(value) == pytest.approx(expected, rel=1e-9)
        derivatives = reference_loops.loss_derivative(name, example, clip.low, clip.high)
        for position, (row_index, token) in enumerate(
            (row_index, token) for row_index, row in enumerate(example.rows) for token in range(len(row.ids))
        ):
            single = [[0.0] * len(row.ids) for row in example.rows]
            single[row_index][token] = derivatives[row_index][token]
            assert float(gradient[position]) == pytest.approx(
                reference_loops.aggregate_losses(single, example.rows, aggregation, 7), abs=1e-12
            )


def test_dual_clip_bounds_large_ratios_of_negative_advantages() -> None:
    example = reference_loops.make_batch(4)
    batch = example.batch()
    ratios = [0.5, 1.0, 1.5, 2.9, 3.1, 40.0]
    ratio_T = torch.tensor([ratios[index % len(ratios)] for index in range(len(batch.ids_T))], dtype=torch.float64)
    objective = clip_objective(ratio_T, batch, Clip(0.2, 0.28, dual=3.0))
    affected = 0
    for index, (ratio, advantage, trained) in enumerate(
        zip(ratio_T.tolist(), batch.advantages_T.tolist(), batch.trained_T.tolist(), strict=True)
    ):
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, 3.0 * advantage)
        affected += trained and advantage < 0 and ratio > 3
        assert float(objective.losses_T[index]) == pytest.approx(-surrogate if trained else 0.0)
        assert bool(objective.clipped_T[index]) == (trained and surrogate != ratio * advantage)
    assert affected, "the dual clip changes no token"


@pytest.mark.parametrize("name", ALL)
@given(seed=seeds, other=st.floats(allow_nan=True, allow_infinity=True))
@hypothesis(max_examples=15, deadline=None)
def test_values_of_other_authors_do_not_change_the_gradient(name: Name, seed: int, other: float) -> None:
    example = reference_loops.make_batch(seed)
    batch, settings = example.batch(), AlgorithmSettings(
        name=name, kl=KLSettings(coefficient=0.2, estimator="k3+"), mismatch=MismatchSettings(truncate="sequence")
    )  # fmt: skip
    value, gradient = step(example.logprobs(), batch, settings)
    untrained = ~batch.trained_T

    def disturbed(values_T: Tensor) -> Tensor:
        return torch.where(untrained, torch.full_like(values_T, other), values_T)

    unwritten = ~batch.mask_T
    after = replace(
        batch,
        old_logprobs_T=torch.where(unwritten, other, batch.old_logprobs_T),
        ref_logprobs_T=torch.where(unwritten, other, batch.ref_logprobs_T),
    )
    value_2, gradient_2 = step(disturbed(example.logprobs()), after, settings)
    assert torch.equal(value, value_2) and torch.equal(gradient, gradient_2)
    assert not gradient[untrained].any()


@pytest.mark.parametrize("aggregation", ["token", "sequence", 7])
@pytest.mark.parametrize("name", ALL)
@given(seed=seeds, order=st.permutations(range(5)))
@hypothesis(max_examples=10, deadline=None)
def test_order_and_micro_batches_do_not_change_loss_and_gradient(
    name: Name, aggregation: Any, seed: int, order: list[int]
) -> None:
    example = reference_loops.make_batch(seed, sequences=5)
    settings = AlgorithmSettings(name=name, aggregate=aggregation, kl=KLSettings(coefficient=0.1))
    loss, gradient = step(example.logprobs(), example.batch(), settings)

    def take_rows(numbers: list[int]) -> reference_loops.ListBatch:
        return reference_loops.ListBatch(
            *([lists[n] for n in numbers] for lists in (example.rows, example.new, example.old, example.ref))
        )

    micro_batches = [take_rows(order[:2]), take_rows(order[2:])]
    totals = step_totals(*(part.batch() for part in micro_batches))
    leaves = [part.logprobs() for part in micro_batches]
    losses = [
        compute_loss(leaf, part.batch(), totals, settings).value
        for leaf, part in zip(leaves, micro_batches, strict=True)
    ]
    assert_close(losses[0] + losses[1], loss)
    gradients = zip(torch.autograd.grad(losses[0] + losses[1], leaves), micro_batches, strict=True)
    split = [
        piece for part_gradient, part in gradients for piece in part_gradient.split([len(row.ids) for row in part.rows])
    ]
    by_row = dict(zip(order, split, strict=True))
    assert_close(torch.cat([by_row[number] for number in range(5)]), gradient)


@pytest.mark.parametrize(("name", "ratios"), [("dapo", (1.25, 1.29)), ("cispo", (4.9, 5.1))])
def test_dapo_and_cispo_clip_higher_on_the_upper_side(name: str, ratios: tuple[float, float]) -> None:
    example = reference_loops.make_batch(0)
    batch = example.batch()
    batch = replace(batch, advantages_T=batch.mask_T.double(), weights_T=batch.mask_T.double())
    for ratio, is_clipped in zip(ratios, (False, True), strict=True):
        logprobs_T = batch.old_logprobs_T + torch.tensor(ratio).double().log()
        clipped_T = ALGORITHMS[name].objective(logprobs_T, batch, ALGORITHMS[name].clip).clipped_T
        assert torch.equal(clipped_T, batch.mask_T & is_clipped)


@pytest.mark.parametrize("distance", [2000.0, -2000.0])
@pytest.mark.parametrize("name", ALL)
def test_very_different_policies_give_finite_numbers(name: Name, distance: float) -> None:
    batch = reference_loops.make_batch(1).batch()
    batch = replace(batch, engine_logprobs_T=batch.old_logprobs_T - distance, ref_logprobs_T=batch.old_logprobs_T)
    settings = AlgorithmSettings(
        name=name, kl=KLSettings(coefficient=1.0), mismatch=MismatchSettings(truncate="sequence", reject="token")
    )
    value, gradient = step(batch.old_logprobs_T + distance, batch, settings)
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())
    loss = compute_loss(batch.old_logprobs_T + distance, batch, step_totals(batch), settings)
    assert all(map(math.isfinite, read_losses([loss])[0].values()))

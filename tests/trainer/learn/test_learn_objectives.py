"""Each algorithm's objective against three loops, and what holds of all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.learn import slow
from trainer.learn.aggregate import Totals
from trainer.learn.algorithms import NAMES, Clip
from trainer.learn.algorithms.base import clipped
from trainer.learn.batch import Batch, pack
from trainer.learn.loss import bounds, loss
from trainer.learn.settings import AlgorithmSettings, KLSettings, MismatchSettings, Name

ALL = sorted(NAMES)
seeds = st.integers(0, 10_000)


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


def step(logprobs_T: Tensor, batch: Batch, asked: AlgorithmSettings) -> tuple[Tensor, Tensor]:
    """The loss and its gradient."""
    leaf = logprobs_T.detach().clone().requires_grad_()
    value = loss(leaf, batch, Totals.of([batch]), asked).value
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ALL)
def test_an_algorithm_is_what_three_loops_say_and_so_is_its_gradient(name: Name, aggregation: str) -> None:
    for seed in range(8):
        made = slow.make(seed)
        asked = AlgorithmSettings(name=name, aggregate=aggregation, length=7)
        clip = bounds(asked)
        value, gradient = step(made.logprobs(), made.batch(), asked)
        expected = slow.aggregate(slow.objective(name, made, clip.low, clip.high), made.rows, aggregation, 7)
        assert float(value) == pytest.approx(expected, rel=1e-9)
        pulls = slow.pull(name, made, clip.low, clip.high)
        for place, (number, token) in enumerate(
            (number, token) for number, row in enumerate(made.rows) for token in range(len(row.ids))
        ):
            one = [[0.0] * len(row.ids) for row in made.rows]
            one[number][token] = pulls[number][token]
            assert float(gradient[place]) == pytest.approx(slow.aggregate(one, made.rows, aggregation, 7), abs=1e-12)


def test_a_ratio_that_ran_away_counts_up_to_the_dual_clip_and_only_where_it_was_punished() -> None:
    made = slow.make(4)
    batch = made.batch()
    ratios = [0.5, 1.0, 1.5, 2.9, 3.1, 40.0]
    ratio_T = torch.tensor([ratios[place % len(ratios)] for place in range(len(batch.ids_T))], dtype=torch.float64)
    seen = clipped(ratio_T, batch, Clip(0.2, 0.28, dual=3.0))
    met = 0
    for place, (ratio, advantage, trained) in enumerate(
        zip(ratio_T.tolist(), batch.advantages_T.tolist(), batch.trained_T.tolist(), strict=True)
    ):
        worth = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        if advantage < 0:
            worth = max(worth, 3.0 * advantage)
        met += trained and advantage < 0 and ratio > 3
        assert float(seen.losses_T[place]) == pytest.approx(-worth if trained else 0.0)
        assert bool(seen.clipped_T[place]) == (trained and worth != ratio * advantage)
    assert met, "no token is told apart by it"


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp"])
def test_the_gradient_is_what_small_differences_say(name: Name) -> None:
    made = slow.make(3)
    batch, asked = made.batch(), AlgorithmSettings(name=name, kl=KLSettings(coefficient=0.1))
    _, gradient = step(made.logprobs(), batch, asked)
    for token in range(len(batch.ids_T)):
        nudge = torch.zeros(len(batch.ids_T), dtype=torch.float64)
        nudge[token] = 1e-6
        above, below = (step(made.logprobs() + sign * nudge, batch, asked)[0] for sign in (1, -1))
        assert float(above - below) / 2e-6 == pytest.approx(float(gradient[token]), abs=1e-7)


def test_a_sequence_ratio_pulls_at_all_its_tokens_as_its_mean_does() -> None:
    made = slow.make(5)
    made.rows = [replace(row, advantages=[0.5 * written for written in row.mask],
                         weights=[float(written) for written in row.mask]) for row in made.rows]  # fmt: skip
    _, gradient = step(made.logprobs(), made.batch(), AlgorithmSettings(name="gspo", clip_low=1.0, clip_high=9.0))
    leaves = [torch.tensor(new, dtype=torch.float64, requires_grad=True) for new in made.new]
    total = torch.zeros((), dtype=torch.float64)
    for row, leaf, old in zip(made.rows, leaves, made.old, strict=True):
        mask = torch.tensor(row.mask)
        total = total - 0.5 * (leaf - torch.tensor(old, dtype=torch.float64))[mask].mean().exp() / len(made.rows)
    same(gradient, torch.cat(torch.autograd.grad(total, leaves)))


@pytest.mark.parametrize("name", ALL)
@given(seed=seeds, other=st.floats(allow_nan=True, allow_infinity=True))
@settings(max_examples=15, deadline=None)
def test_what_the_policy_did_not_write_changes_no_bit_of_the_gradient(name: Name, seed: int, other: float) -> None:
    made = slow.make(seed)
    batch, asked = made.batch(), AlgorithmSettings(
        name=name, kl=KLSettings(coefficient=0.2, estimator="k3+"), mismatch=MismatchSettings(truncate="sequence")
    )  # fmt: skip
    value, gradient = step(made.logprobs(), batch, asked)
    foreign = ~batch.trained_T

    def disturbed(values_T: Tensor) -> Tensor:
        return torch.where(foreign, torch.full_like(values_T, other), values_T)

    unwritten = ~batch.mask_T
    after = replace(
        batch, old_T=torch.where(unwritten, other, batch.old_T), ref_T=torch.where(unwritten, other, batch.ref_T)
    )
    value_2, gradient_2 = step(disturbed(made.logprobs()), after, asked)
    assert torch.equal(value, value_2) and torch.equal(gradient, gradient_2)
    assert not gradient[foreign].any()


@pytest.mark.parametrize("name", ALL)
def test_another_target_where_the_policy_did_not_write_leaves_the_logits_gradient_as_it_was(name: Name) -> None:
    made = slow.make(11)
    batch = made.batch()
    logits_TV = torch.randn(len(batch.ids_T), 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(ids_T: Tensor) -> Tensor:
        leaf = logits_TV.clone().requires_grad_()
        scored_T = leaf.log_softmax(-1).roll(1, 0).gather(1, ids_T[:, None])[:, 0]
        taken = replace(batch, ids_T=ids_T)
        (found,) = torch.autograd.grad(
            loss(scored_T, taken, Totals.of([taken]), AlgorithmSettings(name=name)).value, leaf
        )
        return found

    before = gradient(batch.ids_T)
    assert before.any()
    for token in (~batch.mask_T).nonzero().flatten().tolist():
        for other in range(9):
            ids_T = batch.ids_T.clone()
            ids_T[token] = other
            assert torch.equal(gradient(ids_T), before)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ALL)
@given(seed=seeds, order=st.permutations(range(5)))
@settings(max_examples=10, deadline=None)
def test_the_order_of_packing_and_the_cut_into_micro_batches_change_nothing(
    name: Name, aggregation: str, seed: int, order: list[int]
) -> None:
    made = slow.make(seed, sequences=5)
    asked = AlgorithmSettings(name=name, aggregate=aggregation, kl=KLSettings(coefficient=0.1))
    whole, gradient = step(made.logprobs(), made.batch(), asked)

    def part(numbers: list[int]) -> slow.Slow:
        return slow.Slow(*([lists[n] for n in numbers] for lists in (made.rows, made.new, made.old, made.ref)))

    cuts = [part(order[:2]), part(order[2:])]
    totals = Totals.of(cut.batch() for cut in cuts)
    leaves = [cut.logprobs() for cut in cuts]
    parts = [loss(leaf, cut.batch(), totals, asked).value for leaf, cut in zip(leaves, cuts, strict=True)]
    same(parts[0] + parts[1], whole)
    pulls = zip(torch.autograd.grad(parts[0] + parts[1], leaves), cuts, strict=True)
    split = [piece for pull, cut in pulls for piece in pull.split([len(row.ids) for row in cut.rows])]
    pieces = dict(zip(order, split, strict=True))
    same(torch.cat([pieces[number] for number in range(5)]), gradient)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_past_the_clip_a_gain_pulls_no_more_but_a_loss_does(seed: int) -> None:
    made = slow.make(seed, apart=0.8)
    batch, asked = made.batch(), AlgorithmSettings(name="grpo")
    _, gradient = step(made.logprobs(), batch, asked)
    ratio = (made.logprobs().detach() - batch.old_T).exp()
    gained = ((ratio > 1.2) & (batch.advantages_T > 0)) | ((ratio < 0.8) & (batch.advantages_T < 0))
    pulled = batch.trained_T & (batch.advantages_T != 0)
    assert not gradient[gained].any()
    assert torch.equal(NAMES["grpo"].objective(made.logprobs(), batch, bounds(asked)).clipped_T, gained & pulled)
    assert bool((gradient[pulled & ~gained] != 0).all())


def test_the_clip_of_dapo_lets_rise_further_than_it_lets_fall() -> None:
    made = slow.make(0)
    batch = made.batch()
    batch = replace(batch, advantages_T=batch.mask_T.double(), weights_T=batch.mask_T.double())
    for ratio, bound in ((1.25, False), (1.29, True)):
        logprobs_T = batch.old_T + torch.tensor(ratio).double().log()
        seen = NAMES["dapo"].objective(logprobs_T, batch, NAMES["dapo"].clip).clipped_T
        assert torch.equal(seen, batch.mask_T & bound)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_cispo_bounds_the_weight_and_drops_no_token(seed: int) -> None:
    made = slow.make(seed, apart=1.5)
    batch = made.batch()
    _, gradient = step(made.logprobs(), batch, AlgorithmSettings(name="cispo", aggregate="constant", length=1))
    scaled = gradient * Totals.of([batch]).sequences
    most = 5 * batch.advantages_T.abs() * batch.weights_T
    assert bool((scaled.abs() <= most + 1e-12).all())
    assert bool((gradient[batch.trained_T & (batch.advantages_T != 0)] != 0).all())


@pytest.mark.parametrize("name", ALL)
def test_at_the_old_policy_every_algorithm_is_the_plain_policy_gradient(name: Name) -> None:
    made = slow.make(2)
    made.rows = [replace(row, advantages=[0.7 * written for written in row.mask]) for row in made.rows]
    batch = made.batch()
    _, gradient = step(batch.old_T, batch, AlgorithmSettings(name=name, aggregate="token"))
    same(gradient, -0.7 * batch.weights_T / batch.weights_T.sum())


def test_what_the_loss_tells_of_a_step_that_has_not_moved_is_nothing() -> None:
    batch = slow.make(1).batch()
    batch = replace(batch, engine_T=batch.old_T)
    seen = loss(batch.old_T, batch, Totals.of([batch]), AlgorithmSettings())
    assert seen.tokens == int(batch.trained_T.sum())
    assert seen.metrics == {
        "clipped": 0.0,
        "kl/old": 0.0,
        "mismatch/mean": 0.0,
        "mismatch/max": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/factor": 1.0,
        "mismatch/rejected": 0.0,
    }


@pytest.mark.parametrize("far", [2000.0, -2000.0])
@pytest.mark.parametrize("name", ALL)
def test_policies_worlds_apart_give_numbers_all_the_same(name: Name, far: float) -> None:
    batch = slow.make(1).batch()
    batch = replace(batch, engine_T=batch.old_T - far, ref_T=batch.old_T)
    asked = AlgorithmSettings(
        name=name, kl=KLSettings(coefficient=1.0), mismatch=MismatchSettings(truncate="sequence", reject="token")
    )
    value, gradient = step(batch.old_T + far, batch, asked)
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())
    seen = loss(batch.old_T + far, batch, Totals.of([batch]), asked)
    assert all(map(math.isfinite, seen.metrics.values()))


def test_how_far_a_step_went_from_the_old_policy_is_told() -> None:
    made = slow.make(9)
    seen = loss(made.logprobs(), made.batch(), Totals.of([made.batch()]), AlgorithmSettings())
    far = [
        new[token] - old[token]
        for row, new, old in zip(made.rows, made.new, made.old, strict=True)
        for token in slow.trained(row)
    ]
    assert seen.metrics["kl/old"] == pytest.approx(sum(math.exp(d) - 1 - d for d in far) / len(far))


def test_a_batch_of_single_precision_stays_so() -> None:
    batch = pack(slow.make(0).rows)
    assert loss(batch.old_T, batch, Totals.of([batch]), AlgorithmSettings()).value.dtype == torch.float32

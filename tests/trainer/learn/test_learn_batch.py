"""A batch that does not add up is refused, by the rollout's name; the docstring's example is a batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.learn import slow
from trainer.learn.aggregate import Totals, aggregate
from trainer.learn.batch import Row, pack
from trainer.learn.finite import NotFinite
from trainer.learn.loss import loss
from trainer.learn.settings import AlgorithmSettings, KLSettings

ONE = Row("q/0", [1, 1, 2], [False, False, True], [0.0, 0.0, -0.4], [0.0, 0.0, 0.7], [0.0, 0.0, 1.0])
TWO = Row("q/1", [1, 1, 3, 3], [False] * 2 + [True] * 2, [0, 0, -0.2, -0.9], [0, 0, -0.7, -0.7], [0, 0, 1.0, 1.0])


def test_rows_lie_end_to_end_and_nothing_is_padded() -> None:
    batch = pack([ONE, TWO])
    assert batch.ids_T.tolist() == [1, 1, 2, 1, 1, 3, 3]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.trained_T.tolist() == batch.mask_T.tolist() == [False, False, True, False, False, True, True]
    assert batch.group_S.tolist() == [0, 0] and batch.names_S == ("q/0", "q/1")
    assert batch.old_T is batch.engine_T
    moved = batch.to("cpu")
    assert moved.ref_T is None and torch.equal(moved.ids_T, batch.ids_T) and moved.names_S == batch.names_S


def test_a_token_mean_a_sequence_mean_and_a_constant_weigh_the_same_losses_differently() -> None:
    batch, losses_T = pack([ONE, TWO]), torch.tensor([9.0, 9.0, 3.0, 9.0, 9.0, 1.0, 2.0])
    totals = Totals.of([batch])
    assert (totals.weight, totals.sequences) == (3.0, 2)
    assert float(aggregate(losses_T, batch, "token", totals)) == 2.0
    assert float(aggregate(losses_T, batch, "sequence", totals)) == (3.0 + 1.5) / 2
    assert float(aggregate(losses_T, batch, "constant", totals, 10)) == pytest.approx(6.0 / 20)


def test_means_do_not_know_the_scale_of_weights_and_a_constant_does() -> None:
    batch = slow.make(3).batch()
    tripled = replace(batch, weights_T=3 * batch.weights_T)
    losses_T = torch.rand(len(batch.ids_T), dtype=torch.float64)
    for kind, factor in (("token", 1.0), ("sequence", 1.0), ("constant", 3.0)):
        before, after = (aggregate(losses_T, each, kind, Totals.of([each]), 5) for each in (batch, tripled))
        torch.testing.assert_close(after, factor * before)


def test_the_same_batch_twice_is_the_same_mean() -> None:
    batch = slow.make(3).batch()
    losses_T = torch.rand(len(batch.ids_T), dtype=torch.float64)
    for kind in ("token", "sequence", "constant"):
        once, twice = Totals.of([batch]), Totals.of([batch, batch])
        half = aggregate(losses_T, batch, kind, twice, 5)
        torch.testing.assert_close(half + half, aggregate(losses_T, batch, kind, once, 5))


def test_a_sequence_that_is_not_trained_is_in_no_mean() -> None:
    silent = replace(TWO, weights=[0.0] * 4)
    batch = pack([ONE, silent])
    assert Totals.of([batch]).sequences == 1
    assert float(aggregate(torch.full((7,), 4.0), batch, "sequence", Totals.of([batch]))) == 4.0


def test_nothing_to_train_is_told_and_not_divided_by() -> None:
    with pytest.raises(ValueError, match="no token of the policy has a weight"):
        Totals.of([pack([replace(TWO, weights=[0.0] * 4)])])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (replace(TWO, weights=[0, 0, 1.0]), r"rollout q/1: its tokens do not line up: \{'ids': 4.*'weights': 3"),
        (replace(TWO, weights=[0, 1.0, 1.0, 1.0]), r"rollout q/1: token 1 \(id 1\) has a weight, and the policy did"),
        (replace(TWO, weights=[0, 0, 1.0, -1.0]), r"rollout q/1: token 3 \(id 3\) has a negative weight"),
        (replace(TWO, mask=[True] * 4), r"rollout q/1: token 0 \(id 1\) comes first"),
        (replace(TWO, advantages=[0, 0, 1.0, math.nan]), r"rollout q/1: token 3 \(id 3\) has an advantage of nan"),
        (replace(TWO, engine=[0, 0, -math.inf, 0]), r"rollout q/1: token 2 \(id 3\) has an engine logprob of -inf"),
        (replace(TWO, weights=[0, 0, math.inf, 0]), r"rollout q/1: token 2 \(id 3\) has a weight of inf"),
    ],
)
def test_a_row_that_does_not_add_up_is_refused_by_name(row: Row, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pack([ONE, row])


def test_tensors_that_do_not_line_up_are_refused() -> None:
    batch = pack([ONE, TWO])
    with pytest.raises(ValueError, match=r"do not line up: .*'old_T': \(2,\)"):
        replace(batch, old_T=torch.zeros(2))
    with pytest.raises(ValueError, match="1 names for groups of shape"):
        replace(batch, names_S=("q/0",))
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        replace(batch, mask_T=batch.weights_T)
    for sequences in ([0, 0, 1, 0, 1, 1, 1], [0] * 7, [0, 0, 0, 1, 1, 1, 2]):
        with pytest.raises(ValueError, match="end to end"):
            replace(batch, sequence_T=torch.tensor(sequences))
    with pytest.raises(ValueError, match="7 tokens with logprobs of shape"):
        loss(torch.zeros(6), batch, Totals.of([batch]), AlgorithmSettings())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_new_logprob_that_is_no_number_is_told_by_its_rollout_and_not_learned_from(value: float) -> None:
    batch = pack([ONE, TWO])
    logprobs_T = batch.old_T.clone()
    logprobs_T[6] = value
    with pytest.raises(NotFinite, match=rf"rollout q/1: token 3 \(id 3\) has a new logprob of {value}"):
        loss(logprobs_T, batch, Totals.of([batch]), AlgorithmSettings())


def test_a_loss_too_large_to_be_a_number_is_told_by_its_rollout() -> None:
    batch = pack([ONE, replace(TWO, advantages=[0, 0, 3e38, 1.0])])
    with pytest.raises(NotFinite, match=r"rollout q/1: token 2 \(id 3\) has a loss of -inf"):
        loss(batch.old_T + 1.0, batch, Totals.of([batch]), AlgorithmSettings(name="rloo"))
    batch = pack([ONE, replace(TWO, advantages=[0, 0, 3e38, 3e38])])
    with pytest.raises(NotFinite, match="too large to be summed"):
        loss(batch.old_T, batch, Totals.of([batch]), AlgorithmSettings(name="rloo", kl=KLSettings()))

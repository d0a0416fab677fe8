"""Tests packing: the example of the docstring, aggregation, and errors that name the rollout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.algorithms import reference_loops
from tests.trainer.algorithms.reference_loops import step_totals
from trainer.algorithms.loss import aggregate_loss, compute_loss, read_losses
from trainer.algorithms.packing import Batch, BatchRow, NotFiniteError, pack
from trainer.algorithms.settings import AlgorithmSettings, KLSettings

ONE = BatchRow("q/0", [1, 1, 2], [False, False, True], [0.0, 0.0, -0.4], [0.0, 0.0, 0.7], [0.0, 0.0, 1.0])
TWO = BatchRow("q/1", [1, 1, 3, 3], [False] * 2 + [True] * 2, [0, 0, -0.2, -0.9], [0, 0, -0.7, -0.7], [0, 0, 1.0, 1.0])


def test_rows_are_packed_end_to_end_without_padding() -> None:
    batch = pack([ONE, TWO])
    assert batch.ids_T.tolist() == [1, 1, 2, 1, 1, 3, 3]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.trained_T.tolist() == batch.mask_T.tolist() == [False, False, True, False, False, True, True]
    assert batch.group_S.tolist() == [0, 0] and batch.names_S == ("q/0", "q/1")
    assert batch.old_logprobs_T is batch.engine_logprobs_T
    moved = batch.to("cpu")
    assert moved.ref_logprobs_T is None and torch.equal(moved.ids_T, batch.ids_T) and moved.names_S == batch.names_S


def test_only_constant_aggregation_depends_on_the_scale_of_weights() -> None:
    batch = reference_loops.make_batch(3).batch()
    tripled = replace(batch, weights_T=3 * batch.weights_T)
    losses_T = torch.rand(len(batch.ids_T), dtype=torch.float64)
    cases: tuple[tuple[Any, float], ...] = (("token", 1.0), ("sequence", 1.0), (5, 3.0))
    for kind, factor in cases:
        before, after = (aggregate_loss(losses_T, part, kind, step_totals(part)) for part in (batch, tripled))
        torch.testing.assert_close(after, factor * before)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (replace(TWO, weights=[0, 0, 1.0]), r"rollout q/1: its token lists differ in length: \{'ids': 4.*'weights': 3"),
        (replace(TWO, weights=[0, 1.0, 1.0, 1.0]), r"rollout q/1: token 1 \(id 1\) has a weight, but the policy did"),
        (replace(TWO, weights=[0, 0, 1.0, -1.0]), r"rollout q/1: token 3 \(id 3\) has a negative weight"),
        (replace(TWO, mask=[True] * 4), r"rollout q/1: token 0 \(id 1\) is masked as the policy's, but is first"),
        (replace(TWO, advantages=[0, 0, 1.0, math.nan]), r"rollout q/1: token 3 \(id 3\) has an advantage of nan"),
        (
            replace(TWO, engine_logprobs=[0, 0, -math.inf, 0]),
            r"rollout q/1: token 2 \(id 3\) has an engine logprob of -inf",
        ),
        (replace(TWO, weights=[0, 0, math.inf, 0]), r"rollout q/1: token 2 \(id 3\) has a weight of inf"),
    ],
)
def test_invalid_row_is_rejected_by_name(row: BatchRow, text: str) -> None:
    with pytest.raises((ValueError, NotFiniteError), match=text):
        pack([ONE, row])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_new_logprob_that_is_not_finite_names_its_rollout(value: float) -> None:
    batch = pack([ONE, TWO])
    logprobs_T = batch.old_logprobs_T.clone()
    logprobs_T[6] = value
    with pytest.raises(NotFiniteError, match=rf"rollout q/1: token 3 \(id 3\) has a new logprob of {value}"):
        read_losses([compute_loss(logprobs_T, batch, step_totals(batch), AlgorithmSettings())])


def test_loss_that_overflows_names_its_rollout() -> None:
    batch = pack([ONE, replace(TWO, advantages=[0, 0, 3e38, 1.0])])
    with pytest.raises(NotFiniteError, match=r"rollout q/1: token 2 \(id 3\) has a loss of -inf"):
        loss = compute_loss(batch.old_logprobs_T + 1.0, batch, step_totals(batch), AlgorithmSettings(name="rloo"))
        read_losses([loss])
    batch = pack([ONE, replace(TWO, advantages=[0, 0, 3e38, 3e38])])
    with pytest.raises(NotFiniteError, match="their sum overflows"):
        settings = AlgorithmSettings(name="rloo", kl=KLSettings())
        read_losses([compute_loss(batch.old_logprobs_T, batch, step_totals(batch), settings)])


def test_copies_of_a_batch_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([BatchRow("a", [5, 6], [False, True], [0.0, -1.0], [0.0, 1.0], [0.0, 1.0])])
    checked: list[str] = []
    monkeypatch.setattr(Batch, "check_finite", lambda self, what, *_: checked.append(what))
    moved = batch.to("cpu").with_old_logprobs(torch.zeros(2)).with_ref_logprobs(torch.zeros(2))
    assert not checked, "each check makes Python wait for a GPU"
    assert moved.ref_logprobs_T is not None and batch.ref_logprobs_T is None
    with pytest.raises(ValueError, match="2 tokens with ref_logprobs_T of shape"):
        batch.with_ref_logprobs(torch.zeros(3))

"""Tests building a train batch from scored groups, and packing it: masks, weights, errors that name rollouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.algorithms import reference_loops
from tests.trainer.algorithms.reference_loops import step_totals
from tests.trainer.algorithms.scored_groups import group, outcomes, scored
from trainer.algorithms.loss import aggregate_loss, compute_loss, read_losses
from trainer.algorithms.packing import Batch, BatchRow, NotFiniteError, pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import build_train_batch, compute_batch_metrics, has_learning_signal
from trainer.reward.scorer import ScoredGroup

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
        settings = AlgorithmSettings(name="rloo")
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


GRPO = AlgorithmSettings()


def with_credit(kind: str, name: str = "grpo") -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"name": name, "credit": {"kind": kind}})


def test_ledger_becomes_a_sequence_with_the_turn_of_each_token() -> None:
    batch = build_train_batch([group(scored("qaattb", 1.0, (0.25, 0.5)))], GRPO, weigh_all_turns)
    (sequence,) = batch.sequences
    assert sequence.turns == (-1, 0, 0, -1, -1, 1)
    assert sequence.mask == (False, True, True, False, False, True)
    assert sequence.weights == (0.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    assert sequence.engine_logprobs[1:3] == (-0.875, -1.0) and sequence.engine_logprobs[3] == 0.0
    assert (batch.names, batch.rewards, batch.turn_scores, batch.rewards_from_turns) == (
        ("1-0/sum/0",),
        (1.0,),
        ((0.25, 0.5),),
        (0.75,),
    )


def test_rollout_without_policy_tokens_is_left_out_and_counted() -> None:
    batch = build_train_batch(
        [group(scored("qq"), scored("qa", 1.0, index=1)), group(scored("q", group="1-1"))], GRPO, weigh_all_turns
    )
    assert batch.empty_rollouts == ("1-0/sum/0", "1-1/sum/0") and batch.names == ("1-0/sum/1",)
    assert compute_batch_metrics(batch) == {"groups/count": 1.0, "groups/teaching": 0.0, "rollout/unwritten": 2.0}


def test_overlong_penalty_counts_policy_tokens_only() -> None:
    long = AlgorithmSettings.model_validate({"overlong": {"limit": 4, "buffer": 2, "penalty": 0.5}})
    batch = build_train_batch(
        [group(scored("qa" + "t" * 50), scored("qa|qbb", 1.0, index=1), scored("qaaaaaa", 1.0, index=2))],
        long,
        weigh_all_turns,
    )
    assert batch.rewards == (0.0, 0.75, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_names_its_rollout(value: float) -> None:
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        build_train_batch([outcomes(0.0, value)], GRPO, weigh_all_turns)
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        has_learning_signal(outcomes(0.0, value), GRPO)
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/0 has a turn with a score of {value}"):
        build_train_batch([group(scored("qatb", 0.0, (0.0, value)))], GRPO, weigh_all_turns)


EQUAL = outcomes(0.1, 0.1, 0.1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["outcome", "discounted", "scores", "turns"])
def test_group_has_a_signal_if_rewards_differ(name: str, kind: str) -> None:
    settings = with_credit(kind, name)
    assert has_learning_signal(outcomes(0.0, 1.0), settings)
    assert not has_learning_signal(EQUAL, settings)
    assert not has_learning_signal(outcomes(1.0), settings)
    assert not has_learning_signal(ScoredGroup(EQUAL.task, ()), settings)

"""Tests building a train batch from scored groups: turns, masks, weights, rewards, and groups with a signal."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis

from tests.trainer.algorithms.scored_groups import group, groups, outcomes, scored
from trainer.algorithms.packing import NotFiniteError
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import build_train_batch, compute_batch_metrics, has_learning_signal
from trainer.reward.scorer import ScoredGroup

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


@given(drawn_group=groups())
@hypothesis(max_examples=60, deadline=None)
def test_batch_has_all_tokens_of_a_group_in_order(drawn_group: ScoredGroup) -> None:
    batch = build_train_batch([drawn_group], GRPO, weigh_all_turns)
    ledgers = [ledger for scored_rollout in drawn_group.scored for ledger in scored_rollout.rollout.ledgers]
    assert [sequence.ids for sequence in batch.sequences] == [ledger.ids for ledger in ledgers]
    assert all(
        (turn >= 0) == is_policy
        for sequence in batch.sequences
        for turn, is_policy in zip(sequence.turns, sequence.mask, strict=True)
    )
    assert [turn for turn in batch.turn_T.tolist() if turn >= 0] == sorted(
        turn for turn in batch.turn_T.tolist() if turn >= 0
    )

"""Tests building a train batch from scored groups: turns, masks, weights, rewards, and groups with a signal."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis

from gateway.errors import ConfigError
from tests.trainer.algorithms.scored_groups import group, groups, outcomes, scored
from trainer.algorithms.packing import NotFiniteError
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import load_token_weight_fn, weigh_all_turns, weigh_last_turn
from trainer.algorithms.train_batch import build_train_batch, compute_batch_metrics, has_learning_signal
from trainer.ledger import Ledger
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


def test_turns_are_counted_over_all_ledgers_of_a_rollout() -> None:
    batch = build_train_batch([group(scored("qa"), scored("qatb|qqqc|qqqq", index=1))], GRPO, weigh_last_turn)
    assert [sequence.rollout_index for sequence in batch.sequences] == [0, 1, 1]
    assert [sequence.turns for sequence in batch.sequences[1:]] == [(-1, 0, -1, 1), (-1, -1, -1, 2)]
    assert [sequence.weights for sequence in batch.sequences[1:]] == [(0.0,) * 4, (0.0, 0.0, 0.0, 1.0)]
    assert batch.turn_T.tolist() == [-1, 0, -1, 1, -1, 2, -1, -1, -1, 3]


def test_rollouts_are_ordered_by_index() -> None:
    first, second = scored("qa", 1.0), scored("qab", 0.0, index=1)
    assert build_train_batch([group(second, first)], GRPO, weigh_all_turns) == build_train_batch(
        [group(first, second)], GRPO, weigh_all_turns
    )


def test_rollout_without_policy_tokens_is_left_out_and_counted() -> None:
    batch = build_train_batch(
        [group(scored("qq"), scored("qa", 1.0, index=1)), group(scored("q", group="1-1"))], GRPO, weigh_all_turns
    )
    assert batch.empty_rollouts == ("1-0/sum/0", "1-1/sum/0") and batch.names == ("1-0/sum/1",)
    assert compute_batch_metrics(batch) == {"groups/count": 1.0, "groups/teaching": 0.0, "rollout/unwritten": 2.0}


def test_overlong_penalty_counts_policy_tokens_only() -> None:
    long = AlgorithmSettings.model_validate({"overlong": {"limit": 4, "margin": 2, "cost": 0.5}})
    batch = build_train_batch(
        [group(scored("qa" + "t" * 50), scored("qa|qbb", 1.0, index=1), scored("qaaaaaa", 1.0, index=2))],
        long,
        weigh_all_turns,
    )
    assert batch.rewards == (0.0, 0.75, 0.5)


def test_batch_of_no_groups_or_unscored_groups_is_empty() -> None:
    for no_rollouts in ([], [ScoredGroup(outcomes(1.0).task, ())]):
        batch = build_train_batch(no_rollouts, GRPO, weigh_all_turns)
        assert batch.sequences == () and compute_batch_metrics(batch)["groups/count"] == 0.0 and not len(batch.turn_T)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_names_its_rollout(value: float) -> None:
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        build_train_batch([outcomes(0.0, value)], GRPO, weigh_all_turns)
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        has_learning_signal(outcomes(0.0, value), GRPO)
    with pytest.raises(NotFiniteError, match=f"rollout 1-0/sum/0 has a turn with a score of {value}"):
        build_train_batch([group(scored("qatb", 0.0, (0.0, value)))], GRPO, weigh_all_turns)


def test_wrong_number_of_turn_scores_raises() -> None:
    with pytest.raises(ValueError, match="rollout 1-0/sum/0: 1 scores for 2 turns"):
        build_train_batch([group(scored("qa|qb", 0.0, (0.5,)))], GRPO, weigh_all_turns)


EQUAL = outcomes(0.1, 0.1, 0.1)
SAME_SUM = group(scored("qatb", 0.5, (0.5, 0.0)), scored("qatb", 0.5, (0.0, 0.5), index=1))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["outcome", "discounted", "scores", "turns"])
def test_group_has_a_signal_if_rewards_differ(name: str, kind: str) -> None:
    settings = with_credit(kind, name)
    assert has_learning_signal(outcomes(0.0, 1.0), settings)
    assert not has_learning_signal(EQUAL, settings)
    assert not has_learning_signal(outcomes(1.0), settings)
    assert not has_learning_signal(ScoredGroup(EQUAL.task, ()), settings)


@pytest.mark.parametrize(
    ("kind", "expected"), [("outcome", False), ("discounted", False), ("scores", True), ("turns", True)]
)
def test_different_turn_scores_are_a_signal_for_turn_credit(kind: str, expected: bool) -> None:
    assert has_learning_signal(SAME_SUM, with_credit(kind)) is expected


@pytest.mark.parametrize("settings", [with_credit("gae"), with_credit("outcome", "reinforce_pp")])
def test_every_group_has_a_signal_without_a_group_baseline(settings: AlgorithmSettings) -> None:
    assert has_learning_signal(EQUAL, settings) and has_learning_signal(outcomes(1.0), settings)
    assert not has_learning_signal(ScoredGroup(EQUAL.task, ()), settings)


def test_groups_with_a_signal_are_counted() -> None:
    assert (
        compute_batch_metrics(build_train_batch([EQUAL, outcomes(0.0, 1.0), EQUAL], GRPO, weigh_all_turns))[
            "groups/teaching"
        ]
        == 1.0
    )
    assert build_train_batch([EQUAL, outcomes(0.0, 1.0), EQUAL], GRPO, weigh_all_turns).groups_with_signal == {1}


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


def test_token_weight_functions_are_loaded_by_name_or_from_a_file(tmp_path: Path) -> None:
    assert load_token_weight_fn("all") is weigh_all_turns and load_token_weight_fn("last") is weigh_last_turn
    assert load_token_weight_fn("trainer.algorithms.token_weights:weigh_last_turn") is weigh_last_turn
    file = tmp_path / "own_rounds.py"
    file.write_text("def half(ledger):\n    return [written / 2 for written in ledger.mask]\n\nNUMBER = 1\n")
    batch = build_train_batch([outcomes(0.0, 1.0, letters="qa")], GRPO, load_token_weight_fn(f"{file}:half"))
    assert batch.sequences[0].weights == (0.0, 0.5)
    with pytest.raises(ConfigError, match="is not a function"):
        load_token_weight_fn(f"{file}:NUMBER")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_token_weight_fn(f"{tmp_path}/elsewhere.py:half")
    with pytest.raises(ConfigError, match="unknown rounds 'first'"):
        load_token_weight_fn("first")


def test_token_weight_function_that_raises_names_the_rollout() -> None:
    def wrong(ledger: Ledger) -> list[float]:
        raise KeyError("turn")

    with pytest.raises(ValueError, match="rollout 1-0/sum/0: wrong raised KeyError: 'turn'"):
        build_train_batch([outcomes(1.0)], GRPO, wrong)


def test_groups_do_not_affect_each_other() -> None:
    both = build_train_batch([SAME_SUM, outcomes(0.0, 1.0)], GRPO, weigh_all_turns)
    assert both.groups == (0, 0, 1, 1)
    assert both.rewards == (0.5, 0.5, 0.0, 1.0)
    assert (
        replace(both.sequences[2], rollout_index=0)
        == build_train_batch([outcomes(0.0, 1.0)], GRPO, weigh_all_turns).sequences[0]
    )

"""Tests credit assignment over turns against loops, GAE, and the step from turns to tokens."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms import credit
from trainer.algorithms.packing import sum_to_go, token_positions

lengths = st.lists(st.integers(1, 4), min_size=1, max_size=7)


def sequence_index(sizes: list[int]) -> Tensor:
    return torch.tensor([index for index, size in enumerate(sizes) for _ in range(size)])


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw_rewards(sizes: list[int], seed: int = 0) -> list[list[float]]:
    random = Random(seed)
    return [[random.choice([0.0, 0.5, 1.0, -0.3]) for _ in range(size)] for size in sizes]


def to_tensor(lists: list[list[float]]) -> Tensor:
    return doubles([value for values in lists for value in values])


@given(sizes=lengths, discount=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_sum_to_go_stays_within_each_sequence(sizes: list[int], discount: float) -> None:
    rewards = draw_rewards(sizes)
    expected = []
    for values in rewards:
        count = len(values)
        expected += [sum(discount ** (k - turn) * values[k] for k in range(turn, count)) for turn in range(count)]
    assert sum_to_go(to_tensor(rewards), sequence_index(sizes), discount).tolist() == pytest.approx(expected, abs=1e-12)
    assert token_positions(sequence_index(sizes)).tolist() == [turn for size in sizes for turn in range(size)]


def test_score_credit_adds_later_scores_to_the_outcome() -> None:
    result = credit.score_credit(doubles([1.0, 0.0]), doubles([0.1, 0.0, 0.2, 0.4]), sequence_index([3, 1]))
    assert result.tolist() == pytest.approx([1.3, 1.2, 1.2, 0.4])
    myopic = credit.score_credit(
        doubles([1.0, 0.0]), doubles([0.1, 0.0, 0.2, 0.4]), sequence_index([3, 1]), discount=0.0
    )
    assert myopic.tolist() == pytest.approx([1.1, 1.0, 1.2, 0.4])


def loop_turn_credit(rewards: list[list[float]], groups: list[int], discount: float) -> list[float]:
    def to_go(index: int, turn: int) -> float:
        return sum(discount ** (k - turn) * rewards[index][k] for k in range(turn, len(rewards[index])))

    credits = []
    for index, own_rewards in enumerate(rewards):
        siblings = [other for other in range(len(rewards)) if groups[other] == groups[index] and other != index]
        for turn in range(len(own_rewards)):
            at_turn = [other for other in siblings if len(rewards[other]) > turn]
            if at_turn:
                credits.append(to_go(index, turn) - fmean(to_go(other, turn) for other in at_turn))
            elif siblings:
                earned_before = sum(discount**k * own_rewards[k] for k in range(turn))
                baseline = fmean(to_go(other, 0) for other in siblings) - earned_before
                credits.append(to_go(index, turn) - baseline)
            else:
                credits.append(0.0)
    return credits


@given(sizes=lengths, seed=st.integers(0, 99), discount=st.sampled_from([0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_turn_credit_equals_loops(sizes: list[int], seed: int, discount: float) -> None:
    rewards, groups = draw_rewards(sizes, seed), [Random(seed + number).choice([4, -1]) for number in range(len(sizes))]
    result = credit.turn_credit(to_tensor(rewards), sequence_index(sizes), torch.tensor(groups), discount)
    assert result.tolist() == pytest.approx(loop_turn_credit(rewards, groups, discount), abs=1e-9)


@given(size=st.integers(1, 6), count=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_equal_siblings_get_exactly_zero_turn_credit(size: int, count: int) -> None:
    rewards = torch.full((size * count,), 0.1)
    assert not credit.turn_credit(rewards, sequence_index([count] * size), torch.zeros(size, dtype=torch.long)).any()


@given(sizes=lengths, discount=st.sampled_from([0.9, 1.0]), lam=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_gae_equals_the_recursion(sizes: list[int], discount: float, lam: float) -> None:
    rewards, values = draw_rewards(sizes, 1), draw_rewards(sizes, 2)
    expected, targets = [], []
    for own_rewards, own_values in zip(rewards, values, strict=True):
        advantage, next_value, advantages = 0.0, 0.0, []
        for turn in reversed(range(len(own_rewards))):
            delta = own_rewards[turn] + discount * next_value - own_values[turn]
            advantage = delta + discount * lam * advantage
            next_value = own_values[turn]
            advantages.append(advantage)
        expected += advantages[::-1]
        targets += [advantage + value for advantage, value in zip(advantages[::-1], own_values, strict=True)]
    estimate = credit.compute_gae(to_tensor(rewards), to_tensor(values), sequence_index(sizes), discount, lam)
    assert estimate.advantages_N.tolist() == pytest.approx(expected, abs=1e-12)
    assert estimate.returns_N.tolist() == pytest.approx(targets, abs=1e-12)

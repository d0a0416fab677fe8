"""Tests credit assignment over turns against loops."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms import credit

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


def test_score_credit_adds_later_scores_to_the_outcome() -> None:
    result = credit.score_credit(doubles([1.0, 0.0]), doubles([0.1, 0.0, 0.2, 0.4]), sequence_index([3, 1]), 0.5)
    assert result.tolist() == pytest.approx([1.15, 1.1, 1.2, 0.4])


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

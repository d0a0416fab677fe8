"""Tests the group advantages of each algorithm, and credit assignment over turns, against loops."""

from __future__ import annotations

import math
from random import Random
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms import credit
from trainer.algorithms.named_algorithms import ALGORITHMS, whiten

GROUPED = sorted(set(ALGORITHMS) - {"reinforce_pp", "sft"})
rewards = st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.7, 1.0, -2.0]), st.sampled_from([-7, 0, 3])), min_size=1)


def loop_advantages(name: str, rewards_S: list[float], group_S: list[int]) -> list[float]:
    advantages = []
    if name == "reinforce_pp_baseline":
        centered = loop_advantages("dr_grpo", rewards_S, group_S)
        return [value / ((stdev(centered) if len(centered) > 1 else 0.0) + 1e-6) for value in centered]
    for index, (reward, group) in enumerate(zip(rewards_S, group_S, strict=True)):
        others = []
        for other, value in enumerate(rewards_S):
            if group_S[other] == group and other != index:
                others.append(value)
        everyone = [*others, reward]
        if len(set(everyone)) == 1:
            advantages.append(0.0)
        elif name == "rloo":
            advantages.append(reward - fmean(others))
        elif name == "dr_grpo":
            advantages.append(reward - fmean(everyone))
        else:
            advantages.append((reward - fmean(everyone)) / (stdev(everyone) + 1e-6))
    return advantages


@pytest.mark.parametrize("name", GROUPED)
@given(rewards_and_groups=rewards)
@settings(max_examples=40, deadline=None)
def test_advantages_equal_loops(name: str, rewards_and_groups: list[tuple[float, int]]) -> None:
    values, groups = map(list, zip(*rewards_and_groups, strict=True))
    result = ALGORITHMS[name].advantages(torch.tensor(values, dtype=torch.float64), torch.tensor(groups))
    assert result.tolist() == pytest.approx(loop_advantages(name, values, groups), abs=1e-9)


@pytest.mark.parametrize("name", GROUPED)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_group_without_variance_has_exactly_zero_advantages(name: str, value: float, size: int) -> None:
    result = ALGORITHMS[name].advantages(torch.full((size,), value), torch.zeros(size, dtype=torch.long))
    assert not result.any()


def test_reinforce_pp_normalises_over_the_whole_batch() -> None:
    algorithm = ALGORITHMS["reinforce_pp"]
    values, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    assert algorithm.whiten and torch.equal(algorithm.advantages(values, groups), values)
    trained = [1.0, 1.0, 0.0, 0.0, 0.0]
    mask = torch.tensor([True, True, True, False, True, True])
    result = whiten(torch.tensor([1.0, 1.0, 0.0, math.nan, 0.0, 0.0]), mask)
    expected = [(value - fmean(trained)) / (stdev(trained) + 1e-6) for value in trained]
    assert result[mask].tolist() == pytest.approx(expected, abs=1e-6) and result[3] == 0
    for size in range(1, 40):
        assert not whiten(torch.full((size,), 0.1), torch.ones(size, dtype=torch.bool)).any()


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

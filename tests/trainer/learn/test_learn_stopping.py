"""A policy that decides when to stop must not be paid for stopping: all groups are enumerated, so that means are exact.

The toy has two arms. Stopping at once pays `stop`. Going on pays `middle` now, and then one of two last turns, paying
`good` or `bad`. A policy of two logits, one for each decision; its true gradient is known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import exp

import pytest
import torch
from torch import Tensor

from tests.trainer.learn.lessons import group as grouped
from tests.trainer.learn.lessons import scored
from trainer.learn.credit import scores, turns
from trainer.learn.lesson import lesson
from trainer.learn.rounds import every
from trainer.learn.settings import AlgorithmSettings
from trainer.learn.worth import rows

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
GO, CHOICE = 0.4, -0.3
"""The logits of going on, and of the good last turn."""


@dataclass(frozen=True)
class Toy:
    stop: float
    middle: float
    good: float
    bad: float

    def paths(self) -> list[tuple[float, list[float], list[tuple[int, float]]]]:
        """Each way through: how likely, its rewards by turn, and of each turn which logit it pulls, and how hard."""
        go, good = sigmoid(GO), sigmoid(CHOICE)
        return [
            (1 - go, [self.stop], [(0, -go)]),
            (go * good, [self.middle, self.good], [(0, 1 - go), (1, 1 - good)]),
            (go * (1 - good), [self.middle, self.bad], [(0, 1 - go), (1, -good)]),
        ]

    def gradient(self) -> list[float]:
        """Of the expected return, by both logits."""
        go, good = sigmoid(GO), sigmoid(CHOICE)
        last = good * self.good + (1 - good) * self.bad
        return [go * (1 - go) * (self.middle + last - self.stop), go * good * (1 - good) * (self.good - self.bad)]

    def expected(self, estimator: Estimator, size: int) -> list[float]:
        """What the estimator finds on average, over every group of this size there is."""
        found = [0.0, 0.0]
        for group in product(self.paths(), repeat=size):
            likely = 1.0
            for one in group:
                likely *= one[0]
            rewards = torch.tensor([reward for one in group for reward in one[1]], dtype=torch.float64)
            sequence = torch.tensor([number for number, one in enumerate(group) for _ in one[1]])
            advantages = estimator(rewards, sequence, torch.zeros(size, dtype=torch.long)).tolist()
            pulls = [pull for one in group for pull in one[2]]
            for advantage, (logit, pull) in zip(advantages, pulls, strict=True):
                found[logit] += likely * advantage * pull / size
        return found


def sigmoid(logit: float) -> float:
    return 1 / (1 + exp(-logit))


def index_by_index(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor) -> Tensor:
    """The natural mistake: each turn's reward less the others' at that index, and then summed over what follows."""
    rewards, sequence = rewards_K.tolist(), sequence_K.tolist()
    place = [sequence[:number].count(mine) for number, mine in enumerate(sequence)]
    centred = []
    for number, reward in enumerate(rewards):
        others = [
            other for at, other in enumerate(rewards) if place[at] == place[number] and sequence[at] != sequence[number]
        ]
        centred.append(reward - (sum(others) / len(others) if others else 0.0))
    summed = [
        sum(centred[at] for at in range(len(rewards)) if sequence[at] == sequence[number] and at >= number)
        for number in range(len(rewards))
    ]
    return torch.tensor(summed, dtype=torch.float64)


ALIKE = Toy(stop=1.0, middle=0.5, good=0.5, bad=0.5)
TOYS = [ALIKE, Toy(0.6, 0.5, 1.0, 0.0), Toy(0.0, 0.3, -0.2, 0.4), Toy(1.0, 0.0, 1.0, 0.0)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("toy", TOYS)
def test_turn_level_advantages_find_the_true_gradient_whoever_decides_when_to_stop(toy: Toy, size: int) -> None:
    assert toy.expected(turns, size) == pytest.approx(toy.gradient(), abs=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_both_arms_worth_the_same_are_left_alone_where_centring_by_index_pays_for_stopping(size: int) -> None:
    assert ALIKE.gradient() == pytest.approx([0.0, 0.0])
    assert ALIKE.expected(turns, size) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert ALIKE.expected(index_by_index, size)[0] < -0.01


@pytest.mark.parametrize("toy", [ALIKE, Toy(0.6, 0.5, 1.0, 0.4)])
def test_the_bias_of_centring_by_index_is_the_mean_of_the_later_turns_that_a_stop_is_spared(toy: Toy) -> None:
    go, size = sigmoid(GO), 6
    last = sigmoid(CHOICE) * toy.good + (1 - sigmoid(CHOICE)) * toy.bad
    met = 1 - (1 - go) ** (size - 1)  # Else nobody else took the turn, and nothing is taken off.
    spared = go * (1 - go) * last * met
    assert toy.expected(index_by_index, size)[0] - toy.gradient()[0] == pytest.approx(-spared, abs=1e-12)


def through_a_lesson(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor) -> Tensor:
    """The same groups as rollouts of one token a turn, whose last reward is the outcome."""
    rollouts = []
    for number in range(len(group_S)):
        mine = rewards_K[sequence_K == number].tolist()
        rollouts.append(scored("qab"[: len(mine) + 1], sum(mine), [*mine[:-1], 0.0], index=number))
    settings = AlgorithmSettings.model_validate({"credit": {"kind": "turns"}, "kl": {"coefficient": 1.0}})
    made = rows(lesson([grouped(*rollouts)], settings, every), settings)
    return torch.tensor([advantage for row in made.rows for advantage in row.advantages[1:]], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("toy", TOYS)
def test_rows_made_of_scored_groups_find_the_true_gradient_too(toy: Toy, size: int) -> None:
    assert toy.expected(through_a_lesson, size) == pytest.approx(toy.gradient(), abs=1e-12)


def test_training_on_arms_worth_the_same_stays_put_and_by_index_drifts_to_stopping() -> None:
    drift = sum(ALIKE.expected(index_by_index, 3)[0] for _ in range(10))
    assert drift < -0.5
    assert abs(sum(ALIKE.expected(turns, 3)[0] for _ in range(10))) < 1e-9


@pytest.mark.parametrize("toy", TOYS)
def test_scores_as_they_were_given_find_the_true_gradient_too(toy: Toy) -> None:
    def plain(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor) -> Tensor:
        return scores(torch.zeros(len(group_S), dtype=torch.float64), rewards_K, sequence_K)

    assert toy.expected(plain, 2) == pytest.approx(toy.gradient(), abs=1e-12)

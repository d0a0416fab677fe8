"""Tests that turn credit does not reward stopping, on a toy whose groups are enumerated, so that means are exact.

The toy has two arms. Stopping at once gives the reward `stop`. Going on gives `middle`, and then one of two last turns
gives `good` or `bad`. The policy has a logit for each decision; its true gradient is known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import exp

import pytest
import torch
from torch import Tensor

from tests.trainer.algorithms.scored_groups import group as grouped
from tests.trainer.algorithms.scored_groups import scored
from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.credit import score_credit
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import build_train_batch

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
GO, CHOICE = 0.4, -0.3
"""The logits of going on, and of the good last turn."""


@dataclass(frozen=True)
class Toy:
    """The rewards of the toy."""

    stop: float
    middle: float
    good: float
    bad: float

    def paths(self) -> list[tuple[float, list[float], list[tuple[int, float]]]]:
        """Each path: its probability, its rewards by turn, and each turn's logit with the derivative of its logprob."""
        go, good = sigmoid(GO), sigmoid(CHOICE)
        return [
            (1 - go, [self.stop], [(0, -go)]),
            (go * good, [self.middle, self.good], [(0, 1 - go), (1, 1 - good)]),
            (go * (1 - good), [self.middle, self.bad], [(0, 1 - go), (1, -good)]),
        ]

    def gradient(self) -> list[float]:
        """The gradient of the expected return with respect to both logits."""
        go, good = sigmoid(GO), sigmoid(CHOICE)
        last = good * self.good + (1 - good) * self.bad
        return [go * (1 - go) * (self.middle + last - self.stop), go * good * (1 - good) * (self.good - self.bad)]

    def expected(self, estimator: Estimator, size: int) -> list[float]:
        """The expectation of the estimated gradient over all groups of this size."""
        gradient = [0.0, 0.0]
        for group in product(self.paths(), repeat=size):
            probability = 1.0
            for path in group:
                probability *= path[0]
            rewards = torch.tensor([reward for path in group for reward in path[1]], dtype=torch.float64)
            sequence = torch.tensor([index for index, path in enumerate(group) for _ in path[1]])
            advantages = estimator(rewards, sequence, torch.zeros(size, dtype=torch.long)).tolist()
            derivatives = [derivative for path in group for derivative in path[2]]
            for advantage, (logit, derivative) in zip(advantages, derivatives, strict=True):
                gradient[logit] += probability * advantage * derivative / size
        return gradient


def sigmoid(logit: float) -> float:
    return 1 / (1 + exp(-logit))


EQUAL = Toy(stop=1.0, middle=0.5, good=0.5, bad=0.5)
TOYS = [EQUAL, Toy(0.6, 0.5, 1.0, 0.0), Toy(0.0, 0.3, -0.2, 0.4), Toy(1.0, 0.0, 1.0, 0.0)]


def through_train_batch(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor) -> Tensor:
    """The same groups as rollouts with one token per turn, whose last reward is the outcome."""
    rollouts = []
    for index in range(len(group_S)):
        rewards = rewards_K[sequence_K == index].tolist()
        rollouts.append(scored("qab"[: len(rewards) + 1], sum(rewards), [*rewards[:-1], 0.0], index=index))
    settings = AlgorithmSettings.model_validate({"credit": {"kind": "turns"}, "kl": {"coefficient": 1.0}})
    result = compute_token_advantages(build_train_batch([grouped(*rollouts)], settings, weigh_all_turns), settings)
    return torch.tensor([advantage for row in result.rows for advantage in row.advantages[1:]], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("toy", TOYS)
def test_advantages_of_scored_groups_estimate_the_true_gradient(toy: Toy, size: int) -> None:
    assert toy.expected(through_train_batch, size) == pytest.approx(toy.gradient(), abs=1e-12)


@pytest.mark.parametrize("toy", TOYS)
def test_score_credit_estimates_the_true_gradient(toy: Toy) -> None:
    def plain(rewards_K: Tensor, sequence_K: Tensor, group_S: Tensor) -> Tensor:
        return score_credit(torch.zeros(len(group_S), dtype=torch.float64), rewards_K, sequence_K)

    assert toy.expected(plain, 2) == pytest.approx(toy.gradient(), abs=1e-12)

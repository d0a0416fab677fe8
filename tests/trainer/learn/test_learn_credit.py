"""Which turn is credited with what, against loops; and how turns become tokens."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.learn import credit
from trainer.learn.segments import places, to_go

lengths = st.lists(st.integers(1, 4), min_size=1, max_size=7)


def laid(sizes: list[int]) -> Tensor:
    return torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)])


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(sizes: list[int], seed: int = 0) -> list[list[float]]:
    random = Random(seed)
    return [[random.choice([0.0, 0.5, 1.0, -0.3]) for _ in range(size)] for size in sizes]


def flat(lists: list[list[float]]) -> Tensor:
    return doubles([value for one in lists for value in one])


@given(sizes=lengths, discount=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_what_is_to_come_is_summed_within_each_sequence(sizes: list[int], discount: float) -> None:
    made = drawn(sizes)
    expected = []
    for rewards in made:
        count = len(rewards)
        expected += [sum(discount ** (at - turn) * rewards[at] for at in range(turn, count)) for turn in range(count)]
    assert to_go(flat(made), laid(sizes), discount).tolist() == pytest.approx(expected, abs=1e-12)
    assert places(laid(sizes)).tolist() == [turn for size in sizes for turn in range(size)]


def test_the_outcome_is_shared_by_all_turns_or_grows_towards_the_last() -> None:
    worth, sequence = doubles([1.0, -2.0]), laid([3, 1])
    assert credit.outcome(worth, sequence).tolist() == [1.0, 1.0, 1.0, -2.0]
    assert credit.discounted(worth, sequence, 0.5).tolist() == [0.25, 0.5, 1.0, -2.0]
    assert credit.discounted(worth, sequence, 1.0).tolist() == credit.outcome(worth, sequence).tolist()


def test_scores_stand_beside_the_outcome_from_their_turn_back() -> None:
    found = credit.scores(doubles([1.0, 0.0]), doubles([0.1, 0.0, 0.2, 0.4]), laid([3, 1]))
    assert found.tolist() == pytest.approx([1.3, 1.2, 1.2, 0.4])
    myopic = credit.scores(doubles([1.0, 0.0]), doubles([0.1, 0.0, 0.2, 0.4]), laid([3, 1]), discount=0.0)
    assert myopic.tolist() == pytest.approx([1.1, 1.0, 1.2, 0.4])


def test_the_outcome_is_paid_for_the_last_turn() -> None:
    found = credit.with_outcome(doubles([0.1, 0.0, 0.2, 0.4]), doubles([1.0, 2.0]), laid([3, 1]))
    assert found.tolist() == pytest.approx([0.1, 0.0, 1.2, 2.4])


def turns_by_loops(made: list[list[float]], groups: list[int], discount: float) -> list[float]:
    def earned(mine: int, turn: int) -> float:
        return sum(discount ** (at - turn) * made[mine][at] for at in range(turn, len(made[mine])))

    found = []
    for mine, rewards in enumerate(made):
        siblings = [other for other in range(len(made)) if groups[other] == groups[mine] and other != mine]
        for turn in range(len(rewards)):
            met = [other for other in siblings if len(made[other]) > turn]
            if met:
                found.append(earned(mine, turn) - fmean(earned(other, turn) for other in met))
            elif siblings:
                had = sum(discount**at * rewards[at] for at in range(turn))
                found.append(earned(mine, turn) - (fmean(earned(other, 0) for other in siblings) - had))
            else:
                found.append(0.0)
    return found


@given(sizes=lengths, seed=st.integers(0, 99), discount=st.sampled_from([0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_turn_level_advantages_are_what_three_loops_say(sizes: list[int], seed: int, discount: float) -> None:
    made, groups = drawn(sizes, seed), [Random(seed + number).choice([4, -1]) for number in range(len(sizes))]
    found = credit.turns(flat(made), laid(sizes), torch.tensor(groups), discount)
    assert found.tolist() == pytest.approx(turns_by_loops(made, groups, discount), abs=1e-9)


@given(size=st.integers(1, 6), count=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_siblings_that_did_alike_get_zero_at_every_turn_to_the_last_bit(size: int, count: int) -> None:
    rewards = torch.full((size * count,), 0.1)
    assert not credit.turns(rewards, laid([count] * size), torch.zeros(size, dtype=torch.long)).any()


def test_a_rollout_that_never_came_to_a_turn_earned_nothing_and_stands_in_the_comparison() -> None:
    found = credit.turns(doubles([1.0, 0.5]), torch.tensor([0, 2]), torch.zeros(3, dtype=torch.long))
    assert found.tolist() == [0.5, -0.5]
    alone = credit.turns(doubles([1.0, 0.5]), torch.tensor([1, 1]), torch.zeros(2, dtype=torch.long))
    assert alone.tolist() == [1.5, 1.5]
    nobody = torch.tensor([], dtype=torch.long)
    assert not len(credit.turns(doubles([]), nobody, torch.zeros(2, dtype=torch.long)))
    assert not len(credit.scores(doubles([1.0]), doubles([]), nobody))


@given(sizes=lengths, discount=st.sampled_from([0.9, 1.0]), trust=st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_a_critics_advantages_are_what_the_recursion_says(sizes: list[int], discount: float, trust: float) -> None:
    rewards, values = drawn(sizes, 1), drawn(sizes, 2)
    expected, targets = [], []
    for given_K, said in zip(rewards, values, strict=True):
        ahead, after, found = 0.0, 0.0, []
        for turn in reversed(range(len(given_K))):
            ahead = given_K[turn] + discount * after - said[turn] + discount * trust * ahead
            after = said[turn]
            found.append(ahead)
        expected += found[::-1]
        targets += [advantage + value for advantage, value in zip(found[::-1], said, strict=True)]
    judged = credit.gae(flat(rewards), flat(values), laid(sizes), discount, trust)
    assert judged.advantages_N.tolist() == pytest.approx(expected, abs=1e-12)
    assert judged.returns_N.tolist() == pytest.approx(targets, abs=1e-12)


def test_a_critic_that_knows_and_one_that_is_not_trusted_agree_with_what_was_earned() -> None:
    rewards, sequence = doubles([0.0, 0.5, 1.0, 2.0]), laid([3, 1])
    earned = to_go(rewards, sequence)
    assert not credit.gae(rewards, earned, sequence, 1.0, 0.7).advantages_N.any()
    found = credit.gae(rewards, doubles([3.0, 1.0, 4.0, 1.0]), sequence, 1.0, 1.0)
    assert found.returns_N.tolist() == pytest.approx(earned.tolist())


def test_tokens_have_what_their_turn_has_and_others_nothing() -> None:
    found = credit.spread(doubles([0.5, -1.0]), torch.tensor([-1, -1, 0, 0, -1, 1]))
    assert found.tolist() == [0.0, 0.0, 0.5, 0.5, 0.0, -1.0]

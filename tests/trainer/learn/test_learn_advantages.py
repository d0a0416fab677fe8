"""What a reward is worth beside its siblings', against loops over the group."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.learn.algorithms import NAMES
from trainer.learn.algorithms.dapo import overlong
from trainer.learn.algorithms.reinforce_pp import whitened
from trainer.learn.finite import NotFinite, finite_S

GROUPED = sorted(set(NAMES) - {"reinforce_pp"})
rewards = st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.7, 1.0, -2.0]), st.sampled_from([-7, 0, 3])), min_size=1)


def by_loops(name: str, given_S: list[float], group_S: list[int]) -> list[float]:
    found = []
    if name == "reinforce_pp_baseline":
        gained = by_loops("dr_grpo", given_S, group_S)
        return [gain / ((stdev(gained) if len(gained) > 1 else 0.0) + 1e-6) for gain in gained]
    for mine, (reward, group) in enumerate(zip(given_S, group_S, strict=True)):
        others = []
        for number, value in enumerate(given_S):
            if group_S[number] == group and number != mine:
                others.append(value)
        everyone = [*others, reward]
        if len(set(everyone)) == 1:
            found.append(0.0)
        elif name == "rloo":
            found.append(reward - fmean(others))
        elif name == "dr_grpo":
            found.append(reward - fmean(everyone))
        else:
            found.append((reward - fmean(everyone)) / (stdev(everyone) + 1e-6))
    return found


@pytest.mark.parametrize("name", GROUPED)
@given(made=rewards)
@settings(max_examples=40, deadline=None)
def test_advantages_are_what_loops_over_the_group_say(name: str, made: list[tuple[float, int]]) -> None:
    values, groups = map(list, zip(*made, strict=True))
    found = NAMES[name].advantages(torch.tensor(values, dtype=torch.float64), torch.tensor(groups))
    assert found.tolist() == pytest.approx(by_loops(name, values, groups), abs=1e-9)


@pytest.mark.parametrize("name", GROUPED)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_group_without_variance_gives_zero_to_the_last_bit(name: str, value: float, size: int) -> None:
    found = NAMES[name].advantages(torch.full((size,), value), torch.zeros(size, dtype=torch.long))
    assert not found.any()


@pytest.mark.parametrize("name", GROUPED)
def test_advantages_follow_their_rollouts_wherever_these_stand(name: str) -> None:
    values, groups = torch.rand(12, dtype=torch.float64), torch.arange(12) % 3
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    found = NAMES[name].advantages(values, groups)
    torch.testing.assert_close(NAMES[name].advantages(values[order], groups[order]), found[order])


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "reinforce_pp_baseline"])
def test_where_spread_is_the_unit_a_reward_may_be_told_on_any_scale(name: str) -> None:
    values, groups = torch.rand(8, dtype=torch.float64), torch.arange(8) // 4
    advantages = NAMES[name].advantages
    torch.testing.assert_close(advantages(5 * values + 3, groups), advantages(values, groups), rtol=1e-4, atol=1e-5)


def test_the_whole_batch_is_the_baseline_of_reinforce_plus_plus() -> None:
    algorithm = NAMES["reinforce_pp"]
    values, groups = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 1])
    assert algorithm.whiten and torch.equal(algorithm.advantages(values, groups), values)
    trained = [1.0, 1.0, 0.0, 0.0, 0.0]
    among = torch.tensor([True, True, True, False, True, True])
    found = whitened(torch.tensor([1.0, 1.0, 0.0, math.nan, 0.0, 0.0]), among)
    expected = [(value - fmean(trained)) / (stdev(trained) + 1e-6) for value in trained]
    assert found[among].tolist() == pytest.approx(expected, abs=1e-6) and found[3] == 0
    for size in range(1, 40):
        assert not whitened(torch.full((size,), 0.1), torch.ones(size, dtype=torch.bool)).any()


def test_length_costs_nothing_then_evenly_more_then_everything() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 300])
    assert overlong(lengths, 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="margin of 200 tokens does not lie within a limit of 100"):
        overlong(lengths, 100, 200)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_told_by_its_rollout(value: float) -> None:
    with pytest.raises(NotFinite, match=f"rollout b/1 has a reward of {value}"):
        finite_S("a reward of", torch.tensor([1.0, value]), ["a/0", "b/1"])
    finite_S("a reward of", torch.tensor([1.0, 0.0]), ["a/0", "b/1"])

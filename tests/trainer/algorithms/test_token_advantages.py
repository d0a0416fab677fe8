"""Tests token advantages: credit, KL in the reward, GAE, whitening, totals, and skipped rows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from tests.trainer.algorithms.reference_loops import step_totals
from tests.trainer.algorithms.scored_groups import group, groups, outcomes, scored
from trainer.algorithms.advantages import TokenAdvantages, compute_token_advantages
from trainer.algorithms.loss import StepTotals, aggregate_loss, compute_loss
from trainer.algorithms.named_algorithms import ALGORITHMS
from trainer.algorithms.packing import Batch, NotFiniteError, pack
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns, weigh_last_turn
from trainer.algorithms.train_batch import TrainBatch, TrainSequence, build_train_batch
from trainer.ledger import Ledger
from trainer.reward.scorer import ScoredGroup

KINDS = ["outcome", "discounted", "scores", "turns", "gae"]
STEPS = st.lists(groups(), min_size=1, max_size=4)
every_kind_and_name = pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in ("grpo", "reinforce_pp")]
)
"""Only whitening, which one algorithm does, comes after the credit."""


def make_settings(kind: str = "outcome", name: str = "grpo", **more: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"name": name, "credit": {"kind": kind, "gamma": 0.5}, **more})


def with_kl(**more: object) -> dict[str, object]:
    """Adds a KL term, so that every row has a gradient and none is skipped."""
    return {"kl": {"coefficient": 0.1}} | more


def critic_values(batch: TrainBatch) -> list[list[float]]:
    """Values of a critic, as a function of ids and positions."""
    return [[math.sin(token + index) for index, token in enumerate(sequence.ids)] for sequence in batch.sequences]


def compute(step: list[ScoredGroup], settings: AlgorithmSettings) -> TokenAdvantages:
    batch = build_train_batch(step, settings, weigh_all_turns)
    return compute_token_advantages(batch, settings, values=critic_values(batch))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"reinforce_pp"}))
@given(step=STEPS)
@hypothesis(max_examples=20, deadline=None)
def test_outcome_credit_is_the_group_advantage(name: str, step: list[ScoredGroup]) -> None:
    settings = make_settings(name=name, **with_kl())
    batch = build_train_batch(step, settings, weigh_all_turns)
    rewards_S = torch.tensor(batch.rewards, dtype=torch.float64)
    expected = ALGORITHMS[name].advantages(rewards_S, torch.tensor(batch.groups)).tolist()
    for sequence, row in zip(batch.sequences, compute_token_advantages(batch, settings).rows, strict=True):
        assert row.advantages == tuple(expected[sequence.rollout_index] * is_policy for is_policy in row.mask)
        assert (row.name, row.group) == (sequence.name, batch.groups[sequence.rollout_index])


@every_kind_and_name
@given(step=STEPS, seed=st.integers(0, 9))
@hypothesis(max_examples=12, deadline=None)
def test_order_of_groups_does_not_change_rows(kind: str, name: str, step: list[ScoredGroup], seed: int) -> None:
    settings = make_settings(kind, name, **with_kl())
    order = Random(seed).sample(range(len(step)), len(step))
    there = compute([step[index] for index in order], settings)
    here = compute(step, settings)
    moved = [(replace(row, group=order[row.group]), index) for index, row in enumerate(there.rows)]
    moved.sort(key=lambda item: item[0].group)
    assert [row for row, _ in moved] == list(here.rows) and there.totals == here.totals
    if kind == "gae":
        assert tuple(there.returns[index] for _, index in moved) == here.returns


def test_earlier_ledgers_share_the_outcome() -> None:
    step = [group(scored("qatb|qqqc", 1.0), scored("qa", 0.0, index=1))]
    first, second, other = compute_token_advantages(
        build_train_batch(step, make_settings(), weigh_all_turns), make_settings()
    ).rows
    gain = first.advantages[1]
    assert gain > 0 and first.advantages == (0.0, gain, 0.0, gain) and second.advantages == (0.0, 0.0, 0.0, gain)
    assert other.advantages == (0.0, -gain)
    later = make_settings("discounted")
    first, second, _ = compute_token_advantages(build_train_batch(step, later, weigh_all_turns), later).rows
    assert (first.advantages[1], first.advantages[3], second.advantages[3]) == (gain / 4, gain / 2, gain)


def test_turn_scores_are_counted_once() -> None:
    """The reward of 1.5 includes a score of 0.5; siblings compare only what came at the end."""
    step = [group(scored("qatb", 1.5, (0.5, 0.0)), scored("qatb", 0.0, index=1))]
    plain = make_settings("scores", "dr_grpo", credit={"kind": "scores"})
    assert compute_token_advantages(build_train_batch(step, plain, weigh_all_turns), plain).rows[0].advantages == (
        0.0,
        1.0,
        0.0,
        0.5,
    )
    turns = make_settings(credit={"kind": "turns"})
    one, other = compute_token_advantages(build_train_batch(step, turns, weigh_all_turns), turns).rows
    assert one.advantages == (0.0, 1.5, 0.0, 1.0) and other.advantages == (0.0, -1.5, 0.0, -1.0)


def test_reference_kl_is_subtracted_from_the_reward() -> None:
    settings = make_settings(name="dr_grpo", kl={"coefficient": 0.5, "in_reward": True})
    batch = build_train_batch([outcomes(1.0, 1.0)], settings, weigh_all_turns)
    near, far = compute_token_advantages(batch, settings, reference_kl=[0.0, 2.0]).rows
    assert (near.advantages[2], far.advantages[2]) == (0.5, -0.5)
    turns = make_settings("turns", kl={"coefficient": 0.5, "in_reward": True})
    near, far = compute_token_advantages(batch, turns, reference_kl=[0.0, 2.0]).rows
    assert near.advantages[-1] == 1.0 and far.advantages[-1] == -1.0
    with pytest.raises(ValueError, match="needs the KL of each of 2 rollouts"):
        compute_token_advantages(batch, settings)
    with pytest.raises(NotFiniteError, match="rollout 1-0/sum/1 has a KL to the reference of nan"):
        compute_token_advantages(batch, settings, reference_kl=[0.0, math.nan])
    in_loss = make_settings(kl={"coefficient": 0.5, "in_reward": False})
    assert not any(
        any(row.advantages) for row in compute_token_advantages(batch, in_loss, reference_kl=[0.0, 2.0]).rows
    )


def gae_recursion(rewards: list[float], values: list[float], discount: float, lam: float) -> list[float]:
    advantage, next_value, advantages = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + discount * next_value - value + discount * lam * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


def test_gae_runs_over_the_policys_tokens_of_all_ledgers() -> None:
    settings = make_settings("gae")
    step = [group(scored("qaatb|qqcc", 1.25, (0.25, 0.0, 0.5))), group(scored("qa", -1.0, group="1-1"))]
    batch = build_train_batch(step, settings, weigh_all_turns)
    values = [[9.0, 0.1, 0.2, 9.0, 0.3], [9.0, 9.0, 0.4, 0.5], [9.0, 0.6]]
    first, second, other = compute_token_advantages(batch, settings, values=values).rows
    policy_values = [0.1, 0.2, 0.3, 0.4, 0.5]
    expected = gae_recursion([0.0, 0.25, 0.0, 0.0, 0.5 + 0.5], policy_values, 0.5, 0.95)
    advantages = [*first.advantages[1:3], first.advantages[4], *second.advantages[2:]]
    assert advantages == pytest.approx(expected, abs=1e-12) and other.advantages == pytest.approx((0.0, -1.6))
    returns = compute_token_advantages(batch, settings, values=values).returns
    assert [returns[0][1], returns[0][2], returns[0][4], *returns[1][2:]] == pytest.approx(
        [advantage + value for advantage, value in zip(expected, policy_values, strict=True)]
    )
    assert [returns[0][0], returns[0][3], *returns[1][:2], returns[2][0]] == [0.0] * 5


def test_whitening_is_over_the_trained_tokens_of_the_step() -> None:
    settings = make_settings(name="reinforce_pp", **with_kl())
    step = [
        group(scored("qaaatb", 1.0)),
        group(scored("qa", 0.0, group="1-1"), scored("qa", -1.0, index=1, group="1-1")),
    ]
    rows = compute_token_advantages(build_train_batch(step, settings, weigh_last_turn), settings).rows
    trained = [value for row in rows for value, weight in zip(row.advantages, row.weights, strict=True) if weight]
    assert sum(trained) == pytest.approx(0.0) and trained == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    assert rows[0].advantages[1:4] == (0.0, 0.0, 0.0)


def gradient_by_row(result: TokenAdvantages, settings: AlgorithmSettings) -> list[dict[str, float]]:
    """The gradient of the loss with respect to each row's logprobs, for a changed policy."""
    batch = pack(result.rows)
    logprobs_T = (batch.engine_logprobs_T + 0.1 * batch.ids_T.sin()).requires_grad_()
    compute_loss(logprobs_T, change_policy(batch), result.totals, settings).value.backward()
    assert logprobs_T.grad is not None
    gradient_T = logprobs_T.grad
    return [
        {row.name: [float(value) for value in gradient_T[batch.sequence_T == index]]}
        for index, row in enumerate(result.rows)
    ]


def change_policy(batch: Batch) -> Batch:
    return replace(batch, old_logprobs_T=batch.engine_logprobs_T - 0.05)


STEP = [outcomes(1.0, 0.0), outcomes(0.5, 0.5, letters="qaaaab"), group(scored("qatb|qqc", 1.0), scored("qa", index=1))]


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"reinforce_pp", "sft"}))
def test_skipping_rows_without_gradient_changes_nothing(name: str) -> None:
    settings = make_settings(name=name)
    batch = build_train_batch(STEP, settings, weigh_all_turns)
    result = compute_token_advantages(batch, settings)
    everything = compute_token_advantages(batch, make_settings(name=name, **with_kl()))
    assert (len(result.rows), result.skipped, len(everything.rows), everything.skipped) == (5, 2, 7, 0)
    weight = step_totals(pack(everything.rows)).weight
    assert result.totals == everything.totals == StepTotals(weight, 6), "a rollout in two ledgers counts once"
    skipped = everything.rows[2:4]
    assert not any(any(row.advantages) for row in skipped)
    full = gradient_by_row(everything, settings)
    assert gradient_by_row(result, settings) == [*full[:2], *full[4:]]
    assert not any(value for row in full[2:4] for values in row.values() for value in values)


def token_factors(batch: TrainBatch, settings: AlgorithmSettings) -> dict[tuple[str, int], float]:
    """How much each token's loss counts in the loss of the step, by rollout and position."""
    result = compute_token_advantages(batch, settings)
    packed = pack(result.all_rows)
    losses_T = torch.zeros(len(packed.ids_T), requires_grad=True)
    aggregate_loss(losses_T, packed, settings.aggregate or "token", result.totals).backward()
    assert losses_T.grad is not None
    factors: dict[tuple[str, int], float] = defaultdict(float)
    position, names = Counter[int](), packed.names_S
    for sequence, factor in zip(packed.sequence_T.tolist(), losses_T.grad.tolist(), strict=True):
        factors[names[sequence], position[sequence]] += factor
        position[sequence] += 1
    return factors


def cut(sequence: TrainSequence, random: Random) -> list[TrainSequence]:
    """The rollout of a sequence in several ledgers, as an agent that branched leaves them: each trains some tokens."""
    owners = [random.randrange(3) for _ in sequence.ids]
    weights = [
        [weight * (owner == ledger) for weight, owner in zip(sequence.weights, owners, strict=True)]
        for ledger in range(3)
    ]
    return [replace(sequence, weights=each) for each in weights]


@pytest.mark.parametrize("aggregate", ["sequence", "token", 7])
@given(step=STEPS, seed=st.integers(0, 99))
@hypothesis(max_examples=30, deadline=None)
def test_tokens_count_alike_however_their_rollout_is_cut_into_ledgers(
    aggregate: str | int, step: list[ScoredGroup], seed: int
) -> None:
    settings, random = make_settings(aggregate=aggregate), Random(seed)
    batch = build_train_batch(step, settings, weigh_all_turns)
    pieces = [piece for sequence in batch.sequences for piece in cut(sequence, random)]
    if any(any(sequence.weights) for sequence in batch.sequences):
        whole, in_pieces = (token_factors(each, settings) for each in (batch, replace(batch, sequences=pieces)))
        assert in_pieces == pytest.approx(whole, rel=1e-5, abs=1e-9)


def test_skipped_rows_are_counted() -> None:
    result = compute_token_advantages(build_train_batch(STEP, make_settings(), weigh_last_turn), make_settings())
    assert result.metrics == {"update/rows": 4.0, "update/idle": 3.0, "update/tokens": 6.0}
    assert result.totals == StepTotals(8.0, 6)


def test_rollouts_without_a_trained_token_count_where_that_is_wanted() -> None:
    def weigh_long(ledger: Ledger) -> tuple[float, ...]:
        return tuple(weight * (len(ledger.turns) > 1) for weight in weigh_all_turns(ledger))

    batch = build_train_batch(STEP, make_settings(), weigh_long)
    trained = compute_token_advantages(batch, make_settings()).totals
    counted = compute_token_advantages(batch, make_settings(count_untrained=True)).totals
    assert 0 < trained.rollouts < counted.rollouts == 6 and trained.weight == counted.weight


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_groups_without_variance_leave_no_rows(kind: str) -> None:
    settings = make_settings(kind)
    for step in ([outcomes(1.0)], [outcomes(0.1, 0.1, 0.1), outcomes(0.1)], []):
        assert compute_token_advantages(build_train_batch(step, settings, weigh_all_turns), settings).rows == ()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_token_weights_leave_no_rows(kind: str) -> None:
    batch = build_train_batch([outcomes(0.0, 1.0)], make_settings(kind), lambda ledger: [0.0] * len(ledger))
    result = compute_token_advantages(batch, make_settings(kind, **with_kl()), values=critic_values(batch))
    assert result.rows == result.returns == () and result.skipped == 2


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_rollouts_does_not_change_rows(kind: str) -> None:
    step = [group(*(scored("qatb", index / 7, (0.1 * index, 0.3), index=index) for index in range(5)))]
    late = [group(*reversed(step[0].scored))]
    for name in ALGORITHMS:
        assert compute(step, make_settings(kind, name)) == compute(late, make_settings(kind, name))

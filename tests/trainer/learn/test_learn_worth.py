"""From a lesson to rows: which token is worth what, what a step divides by, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from tests.trainer.learn.lessons import group, groups, outcomes, scored
from trainer.learn.aggregate import Totals
from trainer.learn.algorithms import NAMES
from trainer.learn.batch import Batch, pack
from trainer.learn.finite import NotFinite
from trainer.learn.lesson import Lesson, lesson
from trainer.learn.loss import loss
from trainer.learn.rounds import every, last
from trainer.learn.settings import AlgorithmSettings
from trainer.learn.worth import Worth, rows
from trainer.reward.scored import ScoredGroup

KINDS = ["outcome", "discounted", "scores", "turns", "gae"]
STEPS = st.lists(groups(), min_size=1, max_size=4)


def asked(kind: str = "outcome", name: str = "grpo", **more: object) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"name": name, "credit": {"kind": kind, "discount": 0.5}, **more})


def whole(**more: object) -> dict[str, object]:
    """A term that every trained token has a part in, so that no row is idle."""
    return {"kl": {"coefficient": 0.1}} | more


def valued(learned: Lesson) -> list[list[float]]:
    """What a critic might say, by what it reads alone."""
    return [[math.sin(token + place) for place, token in enumerate(draft.ids)] for draft in learned.drafts]


def worth(step: list[ScoredGroup], settings: AlgorithmSettings) -> Worth:
    learned = lesson(step, settings, every)
    return rows(learned, settings, values=valued(learned))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(NAMES))
@given(step=STEPS)
@hypothesis(max_examples=12, deadline=None)
def test_what_the_policy_did_not_write_is_worth_nothing(kind: str, name: str, step: list[ScoredGroup]) -> None:
    settings = asked(kind, name, **whole())
    for row in worth(step, settings).rows:
        assert not any(value for value, own in zip(row.advantages, row.mask, strict=True) if not own)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"reinforce_pp"}))
@given(step=STEPS)
@hypothesis(max_examples=20, deadline=None)
def test_credit_by_outcome_is_what_the_algorithm_says_of_the_rollout(name: str, step: list[ScoredGroup]) -> None:
    settings = asked(name=name, **whole())
    learned = lesson(step, settings, every)
    rewards_S = torch.tensor(learned.rewards, dtype=torch.float64)
    expected = NAMES[name].advantages(rewards_S, torch.tensor(learned.groups)).tolist()
    for draft, row in zip(learned.drafts, rows(learned, settings).rows, strict=True):
        assert row.advantages == tuple(expected[draft.rollout] * own for own in row.mask)
        assert (row.name, row.group) == (draft.name, learned.groups[draft.rollout])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@given(step=STEPS, seed=st.integers(0, 9))
@hypothesis(max_examples=12, deadline=None)
def test_the_order_of_groups_changes_no_bit_of_any_row(
    kind: str, name: str, step: list[ScoredGroup], seed: int
) -> None:
    settings = asked(kind, name, **whole())
    order = Random(seed).sample(range(len(step)), len(step))
    there = worth([step[place] for place in order], settings)
    here = worth(step, settings)
    moved = [(replace(row, group=order[row.group]), place) for place, row in enumerate(there.rows)]
    moved.sort(key=lambda one: one[0].group)
    assert [row for row, _ in moved] == list(here.rows) and there.totals == here.totals
    if kind == "gae":
        assert tuple(there.returns[place] for _, place in moved) == here.returns


def test_earlier_ledgers_have_their_part_in_the_outcome() -> None:
    step = [group(scored("qatb|qqqc", 1.0), scored("qa", 0.0, index=1))]
    first, second, other = rows(lesson(step, asked(), every), asked()).rows
    gain = first.advantages[1]
    assert gain > 0 and first.advantages == (0.0, gain, 0.0, gain) and second.advantages == (0.0, 0.0, 0.0, gain)
    assert other.advantages == (0.0, -gain)
    later = asked("discounted")
    first, second, _ = rows(lesson(step, later, every), later).rows
    assert (first.advantages[1], first.advantages[3], second.advantages[3]) == (gain / 4, gain / 2, gain)


def test_what_turns_scored_is_paid_once() -> None:
    """The reward of 1.5 holds a score of 0.5; siblings compare what came at the end alone."""
    step = [group(scored("qatb", 1.5, (0.5, 0.0)), scored("qatb", 0.0, index=1))]
    plain = asked("scores", "dr_grpo", credit={"kind": "scores"})
    assert rows(lesson(step, plain, every), plain).rows[0].advantages == (0.0, 1.0, 0.0, 0.5)
    turns = asked(credit={"kind": "turns"})
    one, other = rows(lesson(step, turns, every), turns).rows
    assert one.advantages == (0.0, 1.5, 0.0, 1.0) and other.advantages == (0.0, -1.5, 0.0, -1.0)


def test_the_distance_to_the_reference_comes_off_the_reward_before_siblings_compare() -> None:
    settings = asked(name="dr_grpo", kl={"coefficient": 0.5, "place": "reward"})
    learned = lesson([outcomes(1.0, 1.0)], settings, every)
    near, far = rows(learned, settings, distances=[0.0, 2.0]).rows
    assert (near.advantages[2], far.advantages[2]) == (0.5, -0.5)
    turns = asked("turns", kl={"coefficient": 0.5, "place": "reward"})
    near, far = rows(learned, turns, distances=[0.0, 2.0]).rows
    assert near.advantages[-1] == 1.0 and far.advantages[-1] == -1.0
    with pytest.raises(ValueError, match="needs a distance of each of 2 rollouts"):
        rows(learned, settings)
    with pytest.raises(NotFinite, match="rollout 1-0/sum/1 has a distance to the reference of nan"):
        rows(learned, settings, distances=[0.0, math.nan])
    beside = asked(kl={"coefficient": 0.5, "place": "loss"})
    assert not any(any(row.advantages) for row in rows(learned, beside, distances=[0.0, 2.0]).rows)


def recursion(rewards: list[float], values: list[float], discount: float, trust: float) -> list[float]:
    ahead, after, found = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + discount * after - value + discount * trust * ahead
        after = value
        found.append(ahead)
    return found[::-1]


def test_a_critic_judges_the_policys_tokens_over_all_ledgers_as_if_nothing_stood_between() -> None:
    settings = asked("gae")
    step = [group(scored("qaatb|qqcc", 1.25, (0.25, 0.0, 0.5))), group(scored("qa", -1.0, group="1-1"))]
    learned = lesson(step, settings, every)
    values = [[9.0, 0.1, 0.2, 9.0, 0.3], [9.0, 9.0, 0.4, 0.5], [9.0, 0.6]]
    first, second, other = rows(learned, settings, values=values).rows
    said = [0.1, 0.2, 0.3, 0.4, 0.5]
    found = recursion([0.0, 0.25, 0.0, 0.0, 0.5 + 0.5], said, 0.5, 0.95)
    mine = [*first.advantages[1:3], first.advantages[4], *second.advantages[2:]]
    assert mine == pytest.approx(found, abs=1e-12) and other.advantages == pytest.approx((0.0, -1.6))
    returns = rows(learned, settings, values=values).returns
    assert [returns[0][1], returns[0][2], returns[0][4], *returns[1][2:]] == pytest.approx(
        [advantage + value for advantage, value in zip(found, said, strict=True)]
    )
    assert [returns[0][0], returns[0][3], *returns[1][:2], returns[2][0]] == [0.0] * 5


def test_what_a_turn_without_a_token_scored_reaches_the_tokens_before_it() -> None:
    one = scored("qa", 1.0, (0.0,))
    spoken = one.rollout.ledger.entries[1]
    ledger = one.rollout.ledger + replace(spoken, ids=(), logprobs=())
    mute = replace(one, rollout=replace(one.rollout, ledger=ledger), turns=(0.0, 0.5), spread=0.5)
    settings = asked("gae")
    learned = lesson([group(mute)], settings, every)
    assert rows(learned, settings, values=[[0.0, 0.0]]).rows[0].advantages == (0.0, 1.0)
    begun = replace(ledger, entries=(ledger.entries[0], ledger.entries[2], spoken))
    mute = replace(mute, rollout=replace(mute.rollout, ledger=begun), turns=(0.5, 0.0))
    step = [group(scored("qa", 0.0, group="1-1")), group(mute)]
    other, mine = rows(lesson(step, settings, every), settings, values=[[0.0, 0.0]] * 2).rows
    assert (other.advantages, mine.advantages) == ((0.0, 0.0), (0.0, 1.0))


@pytest.mark.parametrize("values", [None, [], [[0.0] * 2], [[0.0] * 7, [0.0] * 8]])
def test_a_critic_that_does_not_line_up_is_refused(values: list[list[float]] | None) -> None:
    learned = lesson([outcomes(0.0, 1.0)], asked("gae"), every)
    with pytest.raises(ValueError, match="gae needs what the critic says of each token: of 2 drafts, 14 tokens"):
        rows(learned, asked("gae"), values=values)


def test_a_critic_that_says_no_number_is_told_by_the_rollout() -> None:
    learned = lesson([outcomes(0.0, 1.0, written="qa")], asked("gae"), every)
    with pytest.raises(NotFinite, match="rollout 1-0/sum/1 has a critic's value of nan"):
        rows(learned, asked("gae"), values=[[0.0, 0.0], [0.0, math.nan]])
    assert rows(learned, asked("gae"), values=[[math.nan, 0.0]] * 2).rows


def test_whitening_is_over_the_tokens_of_the_step_that_are_trained() -> None:
    settings = asked(name="reinforce_pp", **whole())
    step = [
        group(scored("qaaatb", 1.0)),
        group(scored("qa", 0.0, group="1-1"), scored("qa", -1.0, index=1, group="1-1")),
    ]
    found = rows(lesson(step, settings, last), settings).rows
    trained = [value for row in found for value, weight in zip(row.advantages, row.weights, strict=True) if weight]
    assert sum(trained) == pytest.approx(0.0) and trained == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    assert found[0].advantages[1:4] == (0.0, 0.0, 0.0)


def gradient(made: Worth, settings: AlgorithmSettings) -> list[dict[str, float]]:
    """Of each row, by name, of the loss by its logprobs' sum over a drifted policy."""
    batch = pack(made.rows)
    logprobs_T = (batch.engine_T + 0.1 * batch.ids_T.sin()).requires_grad_()
    loss(logprobs_T, drifted(batch), made.totals, settings).value.backward()
    assert logprobs_T.grad is not None
    pulls = logprobs_T.grad
    return [
        {row.name: [float(pull) for pull in pulls[batch.sequence_T == place]]} for place, row in enumerate(made.rows)
    ]


def drifted(batch: Batch) -> Batch:
    return replace(batch, old_T=batch.engine_T - 0.05)


STEP = [outcomes(1.0, 0.0), outcomes(0.5, 0.5, written="qaaaab"), group(scored("qatb|qqc", 1.0), scored("qa", index=1))]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"reinforce_pp"}))
def test_leaving_idle_rows_out_changes_no_gradient(name: str) -> None:
    settings = asked(name=name)
    learned = lesson(STEP, settings, every)
    made = rows(learned, settings)
    everything = rows(learned, asked(name=name, **whole()))
    assert (len(made.rows), made.idle, len(everything.rows), everything.idle) == (5, 2, 7, 0)
    assert made.totals == everything.totals == Totals.of([pack(everything.rows)])
    idle = everything.rows[2:4]
    assert not any(any(row.advantages) for row in idle)
    full = gradient(everything, settings)
    assert gradient(made, settings) == [*full[:2], *full[4:]]
    assert not any(pull for one in full[2:4] for pulls in one.values() for pull in pulls)


def test_what_is_left_out_is_counted() -> None:
    made = rows(lesson(STEP, asked(), last), asked())
    assert made.metrics == {"update/rows": 4.0, "update/idle": 3.0, "update/tokens": 6.0}
    assert made.totals == Totals(8.0, 6)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("outcome", name) for name in sorted(NAMES)] + [(kind, "grpo") for kind in ("discounted", "scores", "turns")],
)
def test_where_no_group_has_variance_nothing_is_left_to_learn_from(kind: str, name: str) -> None:
    settings = asked(kind, name)
    for step in ([outcomes(1.0)], [outcomes(0.1, 0.1, 0.1), outcomes(0.1)], []):
        assert rows(lesson(step, settings, every), settings).rows == ()


@pytest.mark.parametrize("kind", KINDS)
def test_where_rounds_weigh_nothing_nothing_is_left_to_learn_from(kind: str) -> None:
    learned = lesson([outcomes(0.0, 1.0)], asked(kind), lambda ledger: [0.0] * len(ledger))
    made = rows(learned, asked(kind, **whole()), values=valued(learned))
    assert made.rows == made.returns == () and made.idle == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_groups_make_the_same_rows_to_the_last_bit_whoever_came_first(kind: str) -> None:
    step = [group(*(scored("qatb", index / 7, (0.1 * index, 0.3), index=index) for index in range(5)))]
    late = [group(*reversed(step[0].scored))]
    for name in NAMES:
        assert worth(step, asked(kind, name)) == worth(late, asked(kind, name))

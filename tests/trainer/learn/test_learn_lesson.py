"""From scored groups to a lesson: who wrote which token in which turn, what it earned, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis

from gateway.errors import ConfigError
from tests.trainer.learn.lessons import group, groups, outcomes, scored
from trainer.learn.finite import NotFinite
from trainer.learn.lesson import lesson, metrics, teaches
from trainer.learn.rounds import every, last, weigh_of
from trainer.learn.settings import AlgorithmSettings
from trainer.ledger import Ledger
from trainer.reward.scored import ScoredGroup

GRPO = AlgorithmSettings()


def credited(kind: str, name: str = "grpo") -> AlgorithmSettings:
    return AlgorithmSettings.model_validate({"name": name, "credit": {"kind": kind}})


def test_a_ledger_becomes_a_draft_with_the_turn_of_each_token() -> None:
    made = lesson([group(scored("qaattb", 1.0, (0.25, 0.5)))], GRPO, every)
    (draft,) = made.drafts
    assert draft.turns == (-1, 0, 0, -1, -1, 1)
    assert draft.mask == (False, True, True, False, False, True)
    assert draft.weights == (0.0, 1.0, 1.0, 0.0, 0.0, 1.0)
    assert draft.engine[1:3] == (-0.875, -1.0) and draft.engine[3] == 0.0
    assert (made.names, made.rewards, made.scores, made.spread) == (("1-0/sum/0",), (1.0,), ((0.25, 0.5),), (0.75,))


def test_turns_are_counted_over_all_ledgers_of_a_rollout_and_the_last_round_is_the_last_of_all() -> None:
    made = lesson([group(scored("qa"), scored("qatb|qqqc|qqqq", index=1))], GRPO, last)
    assert [draft.rollout for draft in made.drafts] == [0, 1, 1]
    assert [draft.turns for draft in made.drafts[1:]] == [(-1, 0, -1, 1), (-1, -1, -1, 2)]
    assert [draft.weights for draft in made.drafts[1:]] == [(0.0,) * 4, (0.0, 0.0, 0.0, 1.0)]
    assert made.turn_T.tolist() == [-1, 0, -1, 1, -1, 2, -1, -1, -1, 3]


def test_rollouts_stand_by_their_index_whichever_was_scored_first() -> None:
    first, second = scored("qa", 1.0), scored("qab", 0.0, index=1)
    assert lesson([group(second, first)], GRPO, every) == lesson([group(first, second)], GRPO, every)


def test_a_rollout_in_which_the_policy_wrote_nothing_is_told_and_takes_no_part() -> None:
    made = lesson([group(scored("qq"), scored("qa", 1.0, index=1)), group(scored("q", group="1-1"))], GRPO, every)
    assert made.unwritten == ("1-0/sum/0", "1-1/sum/0") and made.names == ("1-0/sum/1",)
    assert metrics(made) == {"groups/count": 1.0, "groups/teaching": 0.0, "rollout/unwritten": 2.0}


def test_length_costs_by_what_the_policy_wrote_and_not_by_what_tools_answered() -> None:
    long = AlgorithmSettings.model_validate({"overlong": {"limit": 4, "margin": 2, "cost": 0.5}})
    made = lesson(
        [group(scored("qa" + "t" * 50), scored("qa|qbb", 1.0, index=1), scored("qaaaaaa", 1.0, index=2))], long, every
    )
    assert made.rewards == (0.0, 0.75, 0.5)


def test_no_groups_and_groups_that_nobody_could_score_make_an_empty_lesson() -> None:
    for nothing in ([], [ScoredGroup(outcomes(1.0).task, ())]):
        made = lesson(nothing, GRPO, every)
        assert made.drafts == () and metrics(made)["groups/count"] == 0.0 and not len(made.turn_T)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_told_by_its_rollout(value: float) -> None:
    with pytest.raises(NotFinite, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        lesson([outcomes(0.0, value)], GRPO, every)
    with pytest.raises(NotFinite, match=f"rollout 1-0/sum/1 has a reward of {value}"):
        teaches(outcomes(0.0, value), GRPO)
    with pytest.raises(NotFinite, match=f"rollout 1-0/sum/0 has a turn with a score of {value}"):
        lesson([group(scored("qatb", 0.0, (0.0, value)))], GRPO, every)


def test_scores_that_do_not_line_up_with_the_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout 1-0/sum/0: 1 scores for 2 turns"):
        lesson([group(scored("qa|qb", 0.0, (0.5,)))], GRPO, every)


ALIKE = outcomes(0.1, 0.1, 0.1)
SAME_SUM = group(scored("qatb", 0.5, (0.5, 0.0)), scored("qatb", 0.5, (0.0, 0.5), index=1))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["outcome", "discounted", "scores", "turns"])
def test_a_group_teaches_where_siblings_differ(name: str, kind: str) -> None:
    settings = credited(kind, name)
    assert teaches(outcomes(0.0, 1.0), settings)
    assert not teaches(ALIKE, settings)
    assert not teaches(outcomes(1.0), settings)
    assert not teaches(ScoredGroup(ALIKE.task, ()), settings)


@pytest.mark.parametrize(
    ("kind", "expected"), [("outcome", False), ("discounted", False), ("scores", True), ("turns", True)]
)
def test_turns_that_differ_teach_where_turns_are_credited(kind: str, expected: bool) -> None:
    assert teaches(SAME_SUM, credited(kind)) is expected


@pytest.mark.parametrize("settings", [credited("gae"), credited("outcome", "reinforce_pp")])
def test_every_group_teaches_where_siblings_are_not_the_yardstick(settings: AlgorithmSettings) -> None:
    assert teaches(ALIKE, settings) and teaches(outcomes(1.0), settings)
    assert not teaches(ScoredGroup(ALIKE.task, ()), settings)


def test_groups_are_counted_by_what_they_teach() -> None:
    assert metrics(lesson([ALIKE, outcomes(0.0, 1.0), ALIKE], GRPO, every))["groups/teaching"] == 1.0
    assert lesson([ALIKE, outcomes(0.0, 1.0), ALIKE], GRPO, every).teaching == {1}


@given(made=groups())
@hypothesis(max_examples=60, deadline=None)
def test_whatever_a_group_is_its_tokens_are_all_there_and_in_order(made: ScoredGroup) -> None:
    learned = lesson([made], GRPO, every)
    ledgers = [ledger for one in made.scored for ledger in one.rollout.ledgers]
    assert [draft.ids for draft in learned.drafts] == [ledger.ids for ledger in ledgers]
    assert all(
        (turn >= 0) == own for draft in learned.drafts for turn, own in zip(draft.turns, draft.mask, strict=True)
    )
    assert [turn for turn in learned.turn_T.tolist() if turn >= 0] == sorted(
        turn for turn in learned.turn_T.tolist() if turn >= 0
    )


def test_rounds_are_found_by_their_name_or_in_a_file_of_ones_own(tmp_path: Path) -> None:
    assert weigh_of("all") is every and weigh_of("last") is last
    assert weigh_of("trainer.learn.rounds:last") is last
    own = tmp_path / "own_rounds.py"
    own.write_text("def half(ledger):\n    return [own / 2 for own in ledger.mask]\n\nNOTHING = 1\n")
    made = lesson([outcomes(0.0, 1.0, written="qa")], GRPO, weigh_of(f"{own}:half"))
    assert made.drafts[0].weights == (0.0, 0.5)
    with pytest.raises(ConfigError, match="is no function"):
        weigh_of(f"{own}:NOTHING")
    with pytest.raises(ConfigError, match="there is no such file"):
        weigh_of(f"{tmp_path}/elsewhere.py:half")
    with pytest.raises(ConfigError, match="there are no rounds called 'first'"):
        weigh_of("first")


def test_rounds_that_raise_are_told_by_their_rollout() -> None:
    def wrong(ledger: Ledger) -> list[float]:
        raise KeyError("turn")

    with pytest.raises(ValueError, match="rollout 1-0/sum/0: wrong raised KeyError: 'turn'"):
        lesson([outcomes(1.0)], GRPO, wrong)


def test_what_a_group_scored_is_no_part_of_another() -> None:
    both = lesson([SAME_SUM, outcomes(0.0, 1.0)], GRPO, every)
    assert both.groups == (0, 0, 1, 1)
    assert both.rewards == (0.5, 0.5, 0.0, 1.0)
    assert replace(both.drafts[2], rollout=0) == lesson([outcomes(0.0, 1.0)], GRPO, every).drafts[0]

"""Tests the weighted sum of components, turn scores, success, failures and reward metrics."""

from __future__ import annotations

import math

import pytest

from tests.trainer.reward.attempts import (
    FEEDBACK_TASK,
    TASK,
    answer_group,
    call_turn,
    feedback_entry,
    make_rollout,
    reward_settings,
    score_group,
    tool_entry,
)
from tests.trainer.sample_rollouts import policy
from trainer.reward.scorer import ScoredGroup, Scorer, compute_reward_metrics, compute_reward_times
from trainer.reward.settings import RewardSettings
from trainer.rollout.rollout import StopReason


async def test_reward_is_the_weighted_sum_of_components() -> None:
    won = make_rollout(call_turn("add"), tool_entry("7"), policy("#### 7"))
    group = await score_group(
        None,
        [won, *answer_group("#### 8")],
        right={"function": "answer", "weight": 2.0},
        tidy={"function": "efficiency", "weight": 0.5, "args": {"per_call": 0.25}},
    )
    first, second = group.scored
    assert (first.reward, first.success, first.components) == (1.875, True, {"right": 1.0, "tidy": -0.25})
    assert (second.reward, second.success, second.components) == (0.0, False, {"right": 0.0, "tidy": 0.0})
    assert first.rollout.rewards == first.components and first.rollout.ledger is won.ledger
    assert group.task is TASK and group.failed == ()


async def test_default_reward_is_the_answer() -> None:
    group = await Scorer(RewardSettings()).score(TASK, answer_group("#### 7", "#### 8"))
    assert [(scored.reward, scored.success, dict(scored.components)) for scored in group.scored] == [
        (1.0, True, {"answer": 1.0}),
        (0.0, False, {"answer": 0.0}),
    ]


async def test_success_component_and_threshold_can_be_set() -> None:
    settings = reward_settings(right={"function": "answer"}, gave={"function": "calc_reward", "weight": 0.0})
    settings = settings.model_copy(update={"success": "gave", "success_at": 0.5})
    rollouts = [make_rollout(policy("#### 7"), rewards={"end": end}) for end in (0.4, 0.5)]
    group = await Scorer(settings).score(TASK, rollouts)
    assert [(scored.reward, scored.success) for scored in group.scored] == [(1.0, False), (1.0, True)]


async def test_turn_scores_are_weighted_like_the_components_that_sum_them() -> None:
    rollouts = [
        make_rollout(
            call_turn("add"), tool_entry("3", reward=0.5), policy("3"), feedback_entry("No.", -1.0), policy("#### 7")
        )
    ]
    weighted = await score_group(
        None, rollouts, tools={"function": "tools", "weight": 0.5}, right={"function": "answer"}
    )
    assert weighted.scored[0].turn_scores == (0.25, -1.0, 0.0)
    assert (weighted.scored[0].reward, weighted.scored[0].reward_from_turns) == (1.25, 0.25)
    plain = await score_group(None, rollouts, right={"function": "answer"})
    assert (plain.scored[0].turn_scores, plain.scored[0].reward_from_turns) == ((0.5, -1.0, 0.0), 0.0)
    end = {"function": "outcome", "weight": 2.0}
    with_feedback = [
        make_rollout(
            policy("8"),
            feedback_entry("No.", 0.25),
            policy("#### 7"),
            feedback_entry("", 0.5),
            stop=StopReason.FEEDBACK_DONE,
        )
    ]
    both = (await score_group(None, with_feedback, FEEDBACK_TASK, end=end)).scored[0]
    assert (both.reward, both.turn_scores, both.reward_from_turns) == (1.5, (0.5, 1.0), 1.5)


async def test_turn_scores_cover_all_ledgers() -> None:
    two_ledgers = make_rollout(
        policy("#### 7"), earlier=(make_rollout(call_turn("add"), tool_entry("3", reward=0.5)).ledger,)
    )
    assert (await score_group(None, [two_ledgers], right={"function": "answer"})).scored[0].turn_scores == (0.5, 0.0)


@pytest.mark.parametrize("score", [math.nan, math.inf, 1e16])
async def test_turn_score_that_is_not_finite_fails_the_rollout(score: float) -> None:
    invalid = make_rollout(call_turn("add"), tool_entry("7", reward=score), policy("#### 7"))
    group = await score_group(None, [invalid, *answer_group("#### 7")], right={"function": "answer"})
    assert len(group.scored) == 1
    assert f"the score of a turn is {score:g}" in group.failed[0].reason


async def test_weighted_sum_that_is_too_large_fails_the_rollout() -> None:
    right = {"function": "answer", "weight": 1e300}
    group = await score_group(None, answer_group("#### 7", "#### 8"), right=right)
    assert [scored.reward for scored in group.scored] == [0.0]
    assert "the weighted sum is 1e+300" in group.failed[0].reason


async def test_rollout_ended_by_infrastructure_is_not_scored() -> None:
    broken = make_rollout(policy("#### 7"), stop=StopReason.TOOL_FAILED, index=3)
    group = await score_group(None, [broken, *answer_group("#### 7")], right={"function": "answer"})
    assert [scored.rollout.index for scored in group.scored] == [0]
    assert [failure.reason for failure in group.failed] == ["rollout 0-0/one/3 ended with tool_failed"]


async def test_group_without_rollouts_has_no_scores() -> None:
    assert await score_group(None, [], right={"function": "answer"}) == ScoredGroup(TASK, ())


async def test_metrics_have_each_component_and_count_failures() -> None:
    right, gave = {"function": "answer", "weight": 2.0}, {"function": "calc_reward"}
    rollouts = [*answer_group("#### 7"), make_rollout(policy("#### 8"), rewards={"end": -1.0})]
    groups = [
        await score_group(None, rollouts, right=right, gave=gave),
        await score_group(None, [make_rollout(stop=StopReason.ERROR)], right=right, gave=gave),
    ]
    assert compute_reward_metrics(groups) == {
        "reward/failed": 1.0,
        "reward/mean": 0.5,
        "reward/std": 1.5,
        "reward/right": 0.5,
        "reward/gave": -0.5,
        "success/sampled": 0.5,
    }
    assert compute_reward_metrics(groups[1:]) == {"reward/failed": 1.0} and compute_reward_metrics([]) == {
        "reward/failed": 0.0
    }


async def test_each_component_is_timed_by_group() -> None:
    right, gave = {"function": "answer"}, {"function": "calc_reward"}
    group = await score_group(None, answer_group("#### 7"), right=right, gave=gave)
    assert set(group.seconds) == {"right", "gave"} and all(spent >= 0 for spent in group.seconds.values())
    groups = [ScoredGroup(TASK, (), seconds={"right": 1.0}), ScoredGroup(TASK, (), seconds={"right": 3.0, "gave": 0.5})]
    assert compute_reward_times(groups) == {
        "time/rewards/right/mean_s": 2.0,
        "time/rewards/right/max_s": 3.0,
        "time/rewards/gave/mean_s": 0.5,
        "time/rewards/gave/max_s": 0.5,
    }
    assert compute_reward_times([ScoredGroup(TASK, ())]) == {}

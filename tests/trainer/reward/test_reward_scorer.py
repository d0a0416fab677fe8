"""Components become one reward, with what each turn was scored beside it, and metrics of a step."""

from __future__ import annotations

import math

import pytest

from tests.trainer.reward.attempts import JUDGED, TASK, answered, calls, heard, rollout, saying, scored, settings
from tests.trainer.told import policy
from trainer.reward.scored import ScoredGroup, metrics
from trainer.reward.scorer import Scorer
from trainer.reward.settings import RewardSettings
from trainer.run.rollout import StopReason


async def test_the_reward_is_the_weighted_sum_of_components_and_the_rollout_keeps_them() -> None:
    won = rollout(calls("add"), answered("7"), policy("#### 7"))
    group = await scored(
        None,
        [won, *saying("#### 8")],
        right={"function": "answer", "weight": 2.0},
        tidy={"function": "efficiency", "weight": 0.5, "args": {"per_call": 0.25}},
    )
    first, second = group.scored
    assert (first.reward, first.success, first.components) == (1.875, True, {"right": 1.0, "tidy": -0.25})
    assert (second.reward, second.success, second.components) == (0.0, False, {"right": 0.0, "tidy": 0.0})
    assert first.rollout.rewards == first.components and first.rollout.ledger is won.ledger
    assert group.task is TASK and group.failed == ()


async def test_the_answer_alone_counts_where_nothing_is_set() -> None:
    group = await Scorer(RewardSettings()).score(TASK, saying("#### 7", "#### 8"))
    assert [(one.reward, one.success, dict(one.components)) for one in group.scored] == [
        (1.0, True, {"answer": 1.0}),
        (0.0, False, {"answer": 0.0}),
    ]


async def test_another_component_may_tell_success_and_at_another_mark() -> None:
    made = settings(right={"function": "answer"}, gave={"function": "calc_reward", "weight": 0.0})
    made = made.model_copy(update={"success": "gave", "success_at": 0.5})
    rollouts = [rollout(policy("#### 7"), rewards={"end": end}) for end in (0.4, 0.5)]
    group = await Scorer(made).score(TASK, rollouts)
    assert [(one.reward, one.success) for one in group.scored] == [(1.0, False), (1.0, True)]


async def test_scores_of_turns_are_weighted_as_the_components_that_sum_them() -> None:
    played = [rollout(calls("add"), answered("3", reward=0.5), policy("3"), heard("No.", -1.0), policy("#### 7"))]
    weighed = await scored(None, played, tools={"function": "tools", "weight": 0.5}, right={"function": "answer"})
    assert weighed.scored[0].turns == (0.25, -1.0, 0.0)
    assert (weighed.scored[0].reward, weighed.scored[0].spread) == (1.25, 0.25)
    plain = await scored(None, played, right={"function": "answer"})
    assert (plain.scored[0].turns, plain.scored[0].spread) == ((0.5, -1.0, 0.0), 0.0)
    end = {"function": "outcome", "weight": 2.0}
    judged = [rollout(policy("8"), heard("No.", 0.25), policy("#### 7"), heard("", 0.5), stop=StopReason.FEEDBACK_DONE)]
    both = (await scored(None, judged, JUDGED, end=end)).scored[0]
    assert (both.reward, both.turns, both.spread) == (1.5, (0.5, 1.0), 1.5)


async def test_turns_are_counted_over_all_ledgers() -> None:
    one = rollout(policy("#### 7"), earlier=(rollout(calls("add"), answered("3", reward=0.5)).ledger,))
    assert (await scored(None, [one], right={"function": "answer"})).scored[0].turns == (0.5, 0.0)


@pytest.mark.parametrize("given", [math.nan, math.inf, 1e16])
async def test_a_turn_whose_score_is_no_number_leaves_its_rollout_out(given: float) -> None:
    wrong = rollout(calls("add"), answered("7", reward=given), policy("#### 7"))
    group = await scored(None, [wrong, *saying("#### 7")], right={"function": "answer"})
    assert len(group.scored) == 1
    assert f"the score of a turn is {given:g}" in group.failed[0].reason


async def test_a_sum_that_is_no_number_leaves_its_rollout_out() -> None:
    right = {"function": "answer", "weight": 1e300}
    group = await scored(None, saying("#### 7", "#### 8"), right=right)
    assert [one.reward for one in group.scored] == [0.0]
    assert "the weighted sum is 1e+300" in group.failed[0].reason


async def test_a_rollout_that_infrastructure_ended_is_never_scored() -> None:
    broken = rollout(policy("#### 7"), stop=StopReason.TOOL_FAILED, index=3)
    group = await scored(None, [broken, *saying("#### 7")], right={"function": "answer"})
    assert [one.rollout.index for one in group.scored] == [0]
    assert [one.reason for one in group.failed] == ["rollout 0-0/one/3 ended with tool_failed"]


async def test_a_group_without_rollouts_is_a_group_without_scores() -> None:
    assert await scored(None, [], right={"function": "answer"}) == ScoredGroup(TASK, ())


async def test_metrics_tell_each_component_and_count_what_failed() -> None:
    right, gave = {"function": "answer", "weight": 2.0}, {"function": "calc_reward"}
    rollouts = [*saying("#### 7"), rollout(policy("#### 8"), rewards={"end": -1.0})]
    groups = [
        await scored(None, rollouts, right=right, gave=gave),
        await scored(None, [rollout(stop=StopReason.ERROR)], right=right, gave=gave),
    ]
    assert metrics(groups) == {
        "reward/failed": 1.0,
        "reward/mean": 0.5,
        "reward/std": 1.5,
        "reward/right": 0.5,
        "reward/gave": -0.5,
        "success/sampled": 0.5,
    }
    assert metrics(groups[1:]) == {"reward/failed": 1.0} and metrics([]) == {"reward/failed": 0.0}

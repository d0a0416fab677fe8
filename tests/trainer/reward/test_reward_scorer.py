"""Tests the reward settings, the weighted sum of components, turn scores, success, failures and reward metrics."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.trainer.reward.attempts import (
    FEEDBACK_TASK,
    TASK,
    answer_group,
    call_turn,
    feedback_entry,
    make_rollout,
    score_group,
    tool_entry,
)
from tests.trainer.sample_rollouts import policy
from trainer.reward.scorer import compute_reward_metrics
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


async def test_rollout_ended_by_infrastructure_is_not_scored() -> None:
    broken = make_rollout(policy("#### 7"), stop=StopReason.TOOL_FAILED, index=3)
    group = await score_group(None, [broken, *answer_group("#### 7")], right={"function": "answer"})
    assert [scored.rollout.index for scored in group.scored] == [0]
    assert [failure.reason for failure in group.failed] == ["rollout 0-0/one/3 ended with tool_failed"]


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


RIGHT = {"function": "answer"}


def test_first_component_decides_success_by_default() -> None:
    settings = RewardSettings.model_validate({"components": {"right": RIGHT, "tidy": {"function": "efficiency"}}})
    assert settings.success_component == "right" and settings.components["tidy"].weight == 1.0
    assert settings.model_copy(update={"success": "tidy"}).success_component == "tidy"
    assert RewardSettings().success_component == "answer"
    assert RewardSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"components": {}}, "at least 1"),
        ({"components": {"mean": RIGHT}}, "the component name 'mean' is reserved for a metric of all components"),
        ({"components": {"a b": RIGHT}}, "pattern"),
        ({"components": {"right": RIGHT}, "success": "wrong"}, "success is 'wrong', which is none of right"),
        ({"components": {"right": RIGHT | {"weight": float("nan")}}}, "weight"),
    ],
)
def test_invalid_settings_are_rejected(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardSettings.model_validate(raw)

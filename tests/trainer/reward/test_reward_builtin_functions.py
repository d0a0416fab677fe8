"""Tests the built-in reward functions, and what counts as the policy's answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Outcome
from tests.trainer.reward.attempts import (
    FEEDBACK_TASK,
    TASK,
    call_turn,
    feedback_entry,
    make_attempt,
    score_group,
    tool_entry,
)
from tests.trainer.sample_rollouts import policy
from trainer.reward.functions import answer, efficiency, outcome, tool_quality
from trainer.rollout.rollout import StopReason

RIGHT = "#### 7"


@pytest.mark.parametrize(
    ("text", "truth", "method", "reward"),
    [
        ("#### 7", "7", "strict", 1.0),
        ("#### 7.00", 7, "strict", 1.0),
        ("#### 1,007", 1007.0, "strict", 1.0),
        ("It is 7", "7", "strict", 0.0),
        ("It is 7", "7", "flexible", 1.0),
        ("#### 8 and not 7", "7", "strict", 0.0),
        ("#### 7", "3 and 4 are\n#### 7", "strict", 1.0),
        ("", "7", "flexible", 0.0),
    ],
)
def test_answer_compares_numbers(text: str, truth: object, method: str, reward: float) -> None:
    assert answer(make_attempt(policy(text), task=replace(TASK, truth=truth)), method) == reward  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["#### " + "9" * 100_000, "#### nan", "#### inf", "#### 1e999999", "#### \uff17", "####"]
)
def test_hostile_answers_score_zero(text: str) -> None:
    for method in ("strict", "flexible"):
        assert answer(make_attempt(policy(text), task=replace(TASK, truth="12")), method) == 0.0  # type: ignore[arg-type]


@given(text=st.text(max_size=40), method=st.sampled_from(["strict", "flexible"]))
def test_any_text_scores_zero_or_one(text: str, method: str) -> None:
    assert answer(make_attempt(policy(text)), method) in (0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["answer", "outcome"])
async def test_text_of_tools_and_feedback_is_not_the_answer(function: str) -> None:
    stop = StopReason.TOOL_DONE
    for entries in (
        (call_turn("add"), tool_entry(RIGHT)),
        (policy("I do not know"), feedback_entry(RIGHT, 0.0)),
        (call_turn("add"), tool_entry(RIGHT), policy("That is it.")),
    ):
        for method in ("strict", "flexible"):
            component = {"function": function, "args": {"method": method}}
            group = await score_group(None, [make_attempt(*entries, stop=stop).rollout], right=component)
            assert group.scored[0].components == {"right": 0.0}


def test_answer_is_the_last_turn_unless_truncated() -> None:
    assert make_attempt(policy(RIGHT), feedback_entry("No.", 0.0), policy("#### 8")).answer == "#### 8"
    truncated = replace(policy(RIGHT), finish_reason="length")
    assert make_attempt(truncated, stop=StopReason.LENGTH_TURN).answer == ""
    assert (
        make_attempt(policy(RIGHT), feedback_entry("too long to fit", 0.0), stop=StopReason.LENGTH_ROLLOUT).answer
        == RIGHT
    )
    assert make_attempt().answer == ""


@pytest.mark.parametrize("stop", [stop for stop in StopReason if not stop.is_infrastructure])
def test_outcome_is_the_feedback_or_the_answer_of_ended_rollouts(
    stop: StopReason,
) -> None:
    attempts = [
        make_attempt(policy(RIGHT), stop=stop),
        make_attempt(policy("#### 8"), stop=stop),
        make_attempt(policy(RIGHT), feedback_entry("", 1.0), task=FEEDBACK_TASK, stop=stop),
        make_attempt(
            policy("#### 8"),
            feedback_entry("No.", 0.0),
            policy(RIGHT),
            feedback_entry("", 0.5),
            task=FEEDBACK_TASK,
            stop=stop,
        ),
        make_attempt(policy("#### 8"), feedback_entry("No.", 0.0), task=FEEDBACK_TASK, stop=stop),
    ]
    ended = stop in (StopReason.DONE, StopReason.FEEDBACK_DONE, StopReason.TOOL_DONE, StopReason.STEP_DONE)
    assert [outcome(attempt) for attempt in attempts] == ([1.0, 0.0, 1.0, 0.5, 0.0] if ended else [0.0] * 5)


def test_efficiency_costs_successful_attempts_up_to_the_maximum() -> None:
    entries = (call_turn("add", "add"), tool_entry("3"), policy("7"))
    successful, failed = make_attempt(*entries, success=True), make_attempt(*entries, success=False)
    assert efficiency(successful, per_call=0.05) == -0.1
    assert efficiency(successful, per_call=0, per_turn=0.25) == -0.5
    assert efficiency(successful, per_call=0, per_token=0.125) == -0.125
    assert efficiency(successful, per_call=9, most=0.5) == -0.5
    assert efficiency(failed) == 0.0 and efficiency(failed, always=True) == -0.1
    assert math.copysign(1, efficiency(successful, per_call=0)) == 1


def test_tool_quality_counts_calls_that_the_policy_could_help() -> None:
    results = (Outcome.OK, Outcome.OK, Outcome.INVALID, Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNAVAILABLE)
    attempt = make_attempt(policy("add"), tool_entry("7", *results))
    assert tool_quality(attempt) == (2 - 1) / 4
    assert tool_quality(attempt, invalid=0.5) == (2 - 0.5) / 4
    assert tool_quality(make_attempt(policy("add"), tool_entry("?", Outcome.TIMEOUT))) == 0.0

"""What the shipped functions pay for, and that only the policy's own words are its answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Outcome
from tests.trainer.reward.attempts import JUDGED, TASK, answered, attempt, calls, heard, saying, scored
from tests.trainer.told import policy
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.attempt import Attempt
from trainer.reward.shipped import answer, calc_reward, efficiency, feedback, outcome, tool_quality, tools
from trainer.run.rollout import Rollout, StopReason

RIGHT = "#### 7"


@pytest.mark.parametrize(
    ("said", "truth", "method", "worth"),
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
def test_an_answer_is_right_where_it_is_the_same_number(said: str, truth: object, method: str, worth: float) -> None:
    assert answer(attempt(policy(said), task=replace(TASK, truth=truth)), method) == worth  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "said", ["#### " + "9" * 100_000, "#### nan", "#### inf", "#### 1e999999", "#### \uff17", "####"]
)
def test_hostile_answers_are_wrong_and_nothing_worse(said: str) -> None:
    for method in ("strict", "flexible"):
        assert answer(attempt(policy(said), task=replace(TASK, truth="12")), method) == 0.0  # type: ignore[arg-type]


@given(said=st.text(max_size=40), method=st.sampled_from(["strict", "flexible"]))
def test_any_text_is_worth_nothing_or_all(said: str, method: str) -> None:
    assert answer(attempt(policy(said)), method) in (0.0, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("truth", [None, "seven", "nan", "5 apples", True, ["7"]])
async def test_a_truth_that_no_answer_can_match_leaves_the_rollout_out_and_says_so(truth: object) -> None:
    group = await scored(None, saying(RIGHT), replace(TASK, truth=truth), right={"function": "answer"})
    assert group.scored == ()
    assert "name" in group.failed[0].reason and "0-0/one/0" in group.failed[0].reason


@pytest.mark.parametrize("function", ["answer", "outcome"])
async def test_what_a_tool_or_feedback_says_is_never_the_answer(function: str) -> None:
    done = StopReason.TOOL_DONE
    for entries in (
        (calls("add"), answered(RIGHT)),
        (policy("I do not know"), heard(RIGHT, 0.0)),
        (calls("add"), answered(RIGHT), policy("That is it.")),
    ):
        for method in ("strict", "flexible"):
            given = {"function": function, "args": {"method": method}}
            group = await scored(None, [attempt(*entries, stop=done).rollout], right=given)
            assert group.scored[0].components == {"right": 0.0}


def test_only_the_last_turn_answers_and_only_if_the_policy_ended_it_itself() -> None:
    assert attempt(policy(RIGHT), heard("No.", 0.0), policy("#### 8")).answer == "#### 8"
    cut = replace(policy(RIGHT), stop="length")
    assert attempt(cut, stop=StopReason.LENGTH_TURN).answer == ""
    assert attempt(policy(RIGHT), heard("too long to fit", 0.0), stop=StopReason.LENGTH_ROLLOUT).answer == RIGHT
    assert attempt().answer == ""


def test_reasoning_and_calls_are_no_answer() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": RIGHT, "tool_calls": [{"arguments": RIGHT}]}
    assert attempt(replace(policy(RIGHT), messages=(message,))).answer == ""


def test_the_last_turn_of_several_ledgers_answers() -> None:
    first, anew = attempt(policy("#### 8"), answered("no")).ledger, Entry(Author.TASK, (1,), TASK.messages)
    one = Rollout("one", Ledger((anew, policy(RIGHT))), StopReason.DONE, earlier=(first,))
    assert Attempt(TASK, one).answer == RIGHT and len(Attempt(TASK, one).turns) == 2
    begun = Rollout("one", Ledger((anew,)), StopReason.LENGTH_ROLLOUT, earlier=(first,))
    assert Attempt(TASK, begun).answer == "#### 8" and Attempt(TASK, begun).truncated


def test_an_attempt_tells_whether_tokens_ran_out_and_what_the_row_and_the_plug_ins_said() -> None:
    cut = attempt(policy("on and on"), stop=StopReason.LENGTH_TURN, infos={"seen": 1}, rewards={"end": 0.5})
    assert cut.truncated and not cut.ended and cut.columns == {"level": 2} and cut.infos == {"seen": 1}
    assert not attempt(stop=StopReason.TOOL_CALLS).truncated
    assert [message["role"] for message in cut.messages] == ["user", "assistant"]
    assert calc_reward(cut) == 0.5 and calc_reward(attempt()) == 0.0


def test_tools_and_feedback_are_summed_apart() -> None:
    both = attempt(calls("add"), answered("3", reward=0.25), policy("3"), heard("No.", -0.5), policy("7"))
    assert (tools(both), feedback(both)) == (0.25, -0.5)
    assert both.given(Author.TOOL) == (0.25, 0.0, 0.0) and both.given(Author.FEEDBACK) == (0.0, -0.5, 0.0)


@pytest.mark.parametrize("stop", [stop for stop in StopReason if not stop.infrastructure])
def test_the_outcome_is_what_feedback_scored_or_else_the_answer_and_nothing_before_the_end(
    stop: StopReason,
) -> None:
    tries = [
        attempt(policy(RIGHT), stop=stop),
        attempt(policy("#### 8"), stop=stop),
        attempt(policy(RIGHT), heard("", 1.0), task=JUDGED, stop=stop),
        attempt(policy("#### 8"), heard("No.", 0.0), policy(RIGHT), heard("", 0.5), task=JUDGED, stop=stop),
        attempt(policy("#### 8"), heard("No.", 0.0), task=JUDGED, stop=stop),
    ]
    ended = stop in (StopReason.DONE, StopReason.FEEDBACK_DONE, StopReason.TOOL_DONE, StopReason.STEP_DONE)
    assert [outcome(one) for one in tries] == ([1.0, 0.0, 1.0, 0.5, 0.0] if ended else [0.0] * 5)


def test_efficiency_costs_only_where_it_succeeded_and_never_more_than_the_most() -> None:
    entries = (calls("add", "add"), answered("3"), policy("7"))
    won, lost = attempt(*entries, success=True), attempt(*entries, success=False)
    assert efficiency(won, per_call=0.05) == -0.1
    assert efficiency(won, per_call=0, per_turn=0.25) == -0.5
    assert efficiency(won, per_call=0, per_token=0.125) == -0.125
    assert efficiency(won, per_call=9, most=0.5) == -0.5
    assert efficiency(lost) == 0.0 and efficiency(lost, always=True) == -0.1
    assert math.copysign(1, efficiency(won, per_call=0)) == 1


def test_tool_quality_is_the_share_of_calls_that_went_well() -> None:
    said = (Outcome.OK, Outcome.OK, Outcome.ERROR, Outcome.INVALID)
    assert tool_quality(attempt(calls("add"), answered("", *said)), invalid=0.5) == 0.375
    assert tool_quality(attempt(calls("add"), answered("", Outcome.INVALID))) == -1.0
    assert tool_quality(attempt(calls("add"), answered("", Outcome.OK, Outcome.TIMEOUT))) == 1.0
    assert tool_quality(attempt(policy("7"))) == 0.0

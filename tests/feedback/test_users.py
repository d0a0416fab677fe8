"""The interactions that ship: gsm8k, the script, the attempts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import SessionError
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.base import BaseInteraction, plain_text, said
from gateway.feedback.gsm8k import RIGHT, WRONG, Gsm8kInteraction
from gateway.feedback.scripted import ScriptedInteraction
from gateway.feedback.toolset import FeedbackToolset
from gateway.types import Outcome, Task
from tests.feedback.interactions import PlainInteraction, Recorder, answers

GSM8K = {"class_name": "gateway.feedback.gsm8k.Gsm8kInteraction"}


async def test_the_documented_example_runs_as_it_is_written() -> None:
    interaction = Gsm8kInteraction({})
    instance_id = await interaction.start_interaction(ground_truth="42")
    turn = await interaction.generate_response(instance_id, answers("so it is #### 42"))
    assert turn == (True, "Your response is correct!", 1.0, {})
    turn = await interaction.generate_response(instance_id, answers("#### 41"))
    wrong = "Your response is incorrect! You need to reflect on your answer and try again."
    assert turn == (False, wrong, 0.0, {})
    await interaction.finalize_interaction(instance_id)


@pytest.mark.parametrize(
    ("config", "message", "right"),
    [
        ({}, {"role": "assistant", "content": "It is 42."}, False),
        ({"method": "flexible"}, {"role": "assistant", "content": "It is 42."}, True),
        ({}, {"role": "assistant", "content": [{"type": "text", "text": "#### 42"}]}, True),
        ({}, {"role": "assistant", "content": None}, False),
        ({"role": "user"}, {"role": "user", "content": "42"}, True),
        ({"difficulty": "easy"}, {"role": "assistant", "content": "#### 42.0"}, True),
    ],
)
async def test_gsm8k_reads_the_last_turn_as_it_is_configured(
    config: dict[str, Any], message: dict[str, Any], right: bool
) -> None:
    interaction = Gsm8kInteraction(config)
    instance_id = await interaction.start_interaction(ground_truth=42)
    chat = [{"role": "assistant", "content": "#### 1"}, message]
    turn = await interaction.generate_response(instance_id, chat)
    assert turn[:3] == ((True, RIGHT, 1.0) if right else (False, WRONG, 0.0))


@pytest.mark.parametrize("text", ["42", "#### 42", "I think it is 42."])
async def test_where_no_assistant_spoke_gsm8k_reads_the_user_as_the_older_form_did(text: str) -> None:
    interaction = Gsm8kInteraction({})
    instance_id = await interaction.start_interaction(ground_truth="42")
    assert (await interaction.generate_response(instance_id, [{"role": "user", "content": text}]))[0] is True


async def test_gsm8k_without_a_truth_refuses_the_session() -> None:
    async with FeedbackToolset({"gsm8k": Gsm8kInteraction({})}) as toolset:
        with pytest.raises(SessionError, match="ground_truth"):
            async with toolset.open(Task(feedback="gsm8k")):
                pytest.fail("it opened")


@pytest.mark.parametrize("config", [{"method": "loose"}, {"role": "system"}])
def test_gsm8k_refuses_a_configuration_that_it_cannot_follow(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it is '"):
        Gsm8kInteraction(config)


async def test_an_interaction_without_an_answer_says_so() -> None:
    async with FeedbackToolset({"one": BaseInteraction({})}) as toolset, toolset.open(Task()) as session:
        heard = await session.feedback(answers("a"))
    assert heard.outcome is Outcome.UNAVAILABLE
    assert "does not define generate_response" in str(heard.reason)


async def test_the_base_has_the_documented_defaults() -> None:
    interaction = BaseInteraction({})
    assert interaction.name == "interaction_agent"
    assert await interaction.start_interaction("mine") == "mine"
    assert await interaction.start_interaction() != await interaction.start_interaction()
    assert await interaction.calculate_score("mine") == 0.0


def test_only_the_text_of_a_message_is_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}, "b", {"text": 3}]
    assert (plain_text(parts), plain_text(None), plain_text("c")) == ("a", "", "c")
    assert said([{"role": "user", "content": "a"}]) is None


async def played(config: dict[str, Any], *texts: str, **start: Any) -> list[tuple[bool, Any, float | None]]:
    interaction = ScriptedInteraction(config)
    instance_id = await interaction.start_interaction(**start)
    turns = [await interaction.generate_response(instance_id, answers(text)) for text in texts]
    await interaction.finalize_interaction(instance_id)
    return [turn[:3] for turn in turns]


async def test_a_script_is_said_in_order_and_then_ends_the_rollout() -> None:
    script = {"replies": [{"say": "one", "score": 0.1}, {"say": "two"}], "farewell": "bye"}
    assert await played(script, "a", "b", "c") == [(False, "one", 0.1), (False, "two", 0.0), (True, "bye", 0.0)]


async def test_a_reply_with_a_rule_waits_until_it_fits() -> None:
    script = {
        "replies": [
            {"say": "right", "contains": "42", "score": 1.0, "done": True},
            {"say": "exactly", "equals": "yes"},
            {"say": "a hint"},
        ],
        "otherwise": {"say": "hm"},
    }
    said = [text for _, text, _ in await played(script, "7", "8", " yes ", "it is 42")]
    assert said == ["a hint", "hm", "exactly", "right"]


async def test_a_row_may_bring_its_own_script() -> None:
    assert await played({"replies": [{"say": "no"}]}, "a", replies=[{"say": "yes"}]) == [(False, "yes", 0.0)]


@given(texts=st.lists(st.text(), max_size=6))
async def test_the_same_turns_hear_the_same_script(texts: list[str]) -> None:
    script = {"replies": [{"say": "a", "contains": "x"}, {"say": "b", "equals": ""}, {"say": "c"}]}
    assert await played(script, *texts) == await played(script, *texts)


async def attempted(config: dict[str, Any], *texts: str) -> list[tuple[bool, Any, float, dict[str, Any]]]:
    toolset, task = FeedbackToolset({"one": AttemptsInteraction(config)}), Task(feedback_args={"ground_truth": 42})
    async with toolset, toolset.open(task) as session:
        heard = [await session.feedback(answers(text)) for text in texts]
    return [(one.done, one.message, one.score, dict(one.metadata)) for one in heard]


async def test_a_later_success_is_worth_less_and_ends_the_rollout() -> None:
    turns = await attempted({"interaction": GSM8K, "weights": [1.0, 0.5]}, "#### 1", "#### 42")
    assert turns[0] == (
        False,
        f"{WRONG}\nAttempts left: 2.",
        0.0,
        {"attempt": 1, "attempts_left": 2, "scores": [0.0]},
    )
    assert turns[1] == (True, RIGHT, 0.5, {"attempt": 2, "attempts_left": 1, "scores": [0.0, 1.0]})


async def test_the_last_attempt_ends_the_rollout_and_says_so() -> None:
    config = {"interaction": GSM8K, "max_attempts": 2, "used_up": "That was it.", "remaining": ""}
    turns = await attempted(config, "#### 1", "#### 2", "#### 42")
    assert [(done, text) for done, text, _, _ in turns] == [
        (False, WRONG),
        (True, f"{WRONG}\nThat was it."),
        (True, "That was it."),
    ]
    assert turns[2][2] == 0.0, "an attempt beyond the last scores nothing"


async def test_the_last_weight_holds_for_all_later_attempts() -> None:
    turns = await attempted(
        {"interaction": GSM8K, "weights": [1.0, 0.25], "max_attempts": 5}, "#### 1", "#### 2", "#### 3", "#### 42"
    )
    assert turns[-1][2] == 0.25


async def test_a_failure_of_the_judge_is_no_attempt_and_everything_is_passed_on() -> None:
    wrapper = AttemptsInteraction(
        {"interaction": {"class_name": "tests.feedback.interactions.Recorder"}, "max_attempts": 1}
    )
    inner = wrapper.inner
    assert isinstance(inner, Recorder)
    inner.config["turn"] = RuntimeError("down")
    task = Task(feedback="one", feedback_args={"level": 1})
    async with FeedbackToolset({"one": wrapper}) as toolset, toolset.open(task) as session:
        lost = await session.feedback(answers("a"))
        inner.config = {"returns": (False, "Hm.", None, {"kind": "x"})}
        heard = await session.feedback(answers("a"))
    assert (lost.outcome, heard.outcome) == (Outcome.UNAVAILABLE, Outcome.OK)
    assert (heard.score, heard.metadata["kind"], heard.metadata["scores"]) == (0.25, "x", [0.25])
    assert inner.seen[0] == {"level": 1}
    assert (inner.count("finalize"), inner.closed) == (1, 1)


async def test_the_best_attempt_is_the_score_of_all() -> None:
    wrapper = AttemptsInteraction({"interaction": GSM8K})
    instance_id = await wrapper.start_interaction(ground_truth=42)
    assert await wrapper.calculate_score(instance_id) == 0.0
    await wrapper.generate_response(instance_id, answers("#### 42"))
    assert await wrapper.calculate_score(instance_id) == 1.0
    await wrapper.finalize_interaction(instance_id)


async def test_attempts_stand_before_an_interaction_that_is_not_async() -> None:
    wrapper = AttemptsInteraction({"interaction": {"class_name": "tests.feedback.interactions.PlainInteraction"}})
    async with FeedbackToolset({"one": wrapper}) as toolset, toolset.open(Task(feedback="one")) as session:
        assert (await session.feedback(answers("a"))).message == "2 messages"
    assert isinstance(wrapper.inner, PlainInteraction)


def test_attempts_without_an_interaction_are_refused() -> None:
    with pytest.raises(ValidationError, match="interaction"):
        AttemptsInteraction({"max_attempts": 2})

"""Tests of the shipped interactions gsm8k, scripted and attempts, and of the base class."""

from __future__ import annotations

from typing import Any

from gateway.config.entries import interaction_name
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.gsm8k import RIGHT_REPLY, WRONG_REPLY
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.feedback.scripted import ScriptedInteraction
from gateway.types import Outcome, Task
from mtrl_plugins.verl import gsm8k_rule
from tests.feedback.interactions import Recorder, make_chat

GSM8K = {"class_name": "gateway.feedback.gsm8k.Gsm8kInteraction"}


async def run_script(config: dict[str, Any], *texts: str, **start: Any) -> list[tuple[bool, Any, float | None]]:
    interaction = ScriptedInteraction(config)
    instance_id = await interaction.start_interaction(**start)
    turns = [await interaction.generate_response(instance_id, make_chat(text)) for text in texts]
    await interaction.finalize_interaction(instance_id)
    return [turn[:3] for turn in turns]


async def test_replies_are_given_in_order_and_then_the_rollout_ends() -> None:
    script = {"replies": [{"say": "one", "score": 0.1}, {"say": "two"}], "farewell": "bye"}
    assert await run_script(script, "a", replies=[{"say": "its row's"}]) == [(False, "its row's", 0.0)]
    assert await run_script(script, "a", "b", "c") == [(False, "one", 0.1), (False, "two", 0.0), (True, "bye", 0.0)]


async def test_a_reply_with_a_condition_waits_until_it_matches() -> None:
    script = {
        "replies": [
            {"say": "right", "contains": "42", "score": 1.0, "done": True},
            {"say": "exactly", "equals": "yes"},
            {"say": "a hint"},
        ],
        "otherwise": {"say": "hm"},
    }
    texts = [text for _, text, _ in await run_script(script, "7", "8", " yes ", "it is 42")]
    assert texts == ["a hint", "hm", "exactly", "right"]


async def run_attempts(config: dict[str, Any], *texts: str) -> list[tuple[bool, Any, float, dict[str, Any]]]:
    toolset, task = FeedbackToolset({"one": AttemptsInteraction(config)}), Task(feedback_args={"ground_truth": 42})
    async with toolset, toolset.open(task) as session:
        feedback = [await session.feedback(make_chat(text)) for text in texts]
    return [(turn.done, turn.message, turn.score, dict(turn.metadata)) for turn in feedback]


async def test_a_later_success_has_a_lower_score_and_ends_the_rollout() -> None:
    config = {"interaction": GSM8K, "weights": [1.0, 0.5], "max_attempts": 4}
    turns = await run_attempts(config, "#### 1", "#### 2", "#### 42")
    assert turns[0] == (
        False,
        f"{WRONG_REPLY}\nAttempts left: 3.",
        0.0,
        {"attempt": 1, "attempts_left": 3, "scores": [0.0]},
    )
    assert turns[2] == (True, RIGHT_REPLY, 0.5, {"attempt": 3, "attempts_left": 1, "scores": [0.0, 0.0, 1.0]})


def test_verls_class_can_be_the_judge_of_attempts() -> None:
    verl = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    assert isinstance(AttemptsInteraction({"interaction": verl}).judge, gsm8k_rule.Gsm8kInteraction)


async def test_the_last_attempt_ends_the_rollout_with_a_note() -> None:
    config = {"interaction": GSM8K, "max_attempts": 2, "used_up": "That was it.", "remaining": ""}
    turns = await run_attempts(config, "#### 1", "#### 2", "#### 42")
    assert [(done, text) for done, text, _, _ in turns] == [
        (False, WRONG_REPLY),
        (True, f"{WRONG_REPLY}\nThat was it."),
        (True, "That was it."),
    ]
    assert turns[2][2] == 0.0, "an attempt beyond the last has no score"


async def test_a_failure_of_the_judge_is_not_counted_and_calls_are_passed_on() -> None:
    interaction = AttemptsInteraction(
        {"interaction": {"class_name": "tests.feedback.interactions.Recorder"}, "max_attempts": 1}
    )
    judge = interaction.judge
    assert isinstance(judge, Recorder)
    judge.config["turn"] = RuntimeError("down")
    task = Task(feedback="one", feedback_args={"level": 1})
    async with FeedbackToolset({"one": interaction}) as toolset, toolset.open(task) as session:
        failed = await session.feedback(make_chat("a"))
        judge.config = {"returns": (False, "Hm.", None, {"kind": "x"})}
        feedback = await session.feedback(make_chat("a"))
    assert (failed.outcome, feedback.outcome) == (Outcome.UNAVAILABLE, Outcome.OK)
    assert (feedback.score, feedback.metadata["kind"], feedback.metadata["scores"]) == (0.25, "x", [0.25])
    assert judge.received_kwargs[0] == {"level": 1}
    assert (judge.count("finalize"), judge.closed) == (1, 1)


def test_default_name_of_an_interaction_is_never_empty() -> None:
    assert interaction_name("mine.Interaction") == "interaction"

"""Tests of the toolset of interactions: choice by name, turns, deadlines, and finalizing exactly once."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import Any

import anyio
import pytest

from gateway.errors import ConfigError, SessionError
from gateway.feedback import conversation, interaction_toolset
from gateway.feedback.attempts import AttemptsInteraction
from gateway.feedback.code import CodeInteraction
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import FeedbackSession, FeedbackToolset, build_interaction
from gateway.feedback.simulated import SimulatedInteraction
from gateway.gateway import Gateway
from gateway.tool_table import Source
from gateway.types import Context, Outcome, Task, ToolCall
from tests.feedback.interactions import PlainInteraction, Recorder, make_chat


def make_toolset(**interactions: Any) -> FeedbackToolset:
    return FeedbackToolset(interactions)


async def test_a_named_interaction_starts_at_once_and_the_default_one_at_its_first_turn() -> None:
    interaction = Recorder({})
    async with make_toolset(gsm8k=interaction) as toolset:
        async with toolset.open(Task(feedback="gsm8k")):
            assert interaction.count("start") == 1
        async with toolset.open(Task()) as session:
            assert interaction.count("start") == 1
            await session.feedback(make_chat("a"))
            await session.feedback(make_chat("a", "b"))
            assert interaction.count("start") == 2
    assert interaction.count("finalize") == 2


GSM8K = {"gsm8k": Gsm8kInteraction({})}
ONE, TWO = {"one": Recorder({})}, {"one": Recorder({}), "two": Recorder({})}


@pytest.mark.parametrize(
    ("interactions", "task", "problem"),
    [
        (ONE, Task(), ""),
        (TWO, Task(), "names no interaction.*known: one, two"),
        (TWO, Task(feedback="three"), "named 'three'; known: one, two"),
        (TWO, Task(feedback_args={"ground_truth": 1}), "no interaction is named; known: one, two"),
        (ONE, Task(feedback_args={"messages": []}), "'messages' is reserved"),
        (GSM8K, Task(feedback="gsm8k"), "gsm8k needs `ground_truth`"),
    ],
)
async def test_a_session_has_the_named_or_the_only_interaction_or_says_what_there_is(
    interactions: dict[str, Any], task: Task, problem: str
) -> None:
    with pytest.raises(SessionError, match=problem) if problem else nullcontext():
        async with make_toolset(**interactions) as toolset, toolset.open(task) as session:
            assert (await session.feedback(make_chat("a"))).score == 0.5


async def test_a_call_of_a_named_interaction_is_a_turn_and_there_is_no_other() -> None:
    interaction = Recorder({"id": "its own", "returns": (True, "Good.", 0.75, {"n": 1})})
    task, arguments = Task(feedback="one", feedback_args={"level": 1}), json.dumps({"messages": make_chat("a")})
    async with make_toolset(one=interaction, two=Recorder({})) as toolset, toolset.open(task) as session:
        assert [(spec.name, spec.audience) for spec in session.specs] == [("feedback_one", "loop")]
        result = await session.call(ToolCall("c", "feedback_one", arguments))
        assert (await session.call(ToolCall("c", "feedback_two", arguments))).outcome is Outcome.INVALID
        assert await session.finish() == {}, "a turn's score is not counted again at the end"
    assert (result.text, result.reward, result.done, dict(result.metrics)) == ("Good.", 0.75, True, {"n": 1})
    assert interaction.log[1:] == [("turn", "its own"), ("finalize", "its own")]
    assert interaction.received_kwargs[0] == {"level": 1}


async def test_a_failed_start_is_finalized_and_not_tried_again_and_without_a_start_nothing_is() -> None:
    interaction = Recorder({"start": ValueError("no such level"), "finalize": KeyError("unknown")})
    async with make_toolset(one=interaction) as toolset:
        async with toolset.open(Task()):
            pass
        async with toolset.open(Task()) as session:
            outcomes = [(await session.feedback(make_chat("a"))).outcome for _ in range(2)]
        with pytest.raises(SessionError, match="no such level"):
            async with toolset.open(Task(feedback="one")):
                pytest.fail("it opened")
        assert toolset.counts["one", "finalize_failed"] == 0
    assert outcomes == [Outcome.UNAVAILABLE] * 2
    assert [method for method, _ in interaction.log] == ["start", "finalize"] * 2


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        (dict, {}, "class_name: .*lacks start_interaction, generate_response, finalize_interaction"),
        (SimulatedInteraction, {"base_url": "http://a", "model": "m", "api_key": ["hunter2"]}, r"config\.api_key: "),
        (Gsm8kInteraction, {"method": "loose"}, "'strict' or 'flexible'"),
        (CodeInteraction, {"network": True}, r"config\.network: "),
        (AttemptsInteraction, {"interaction": {"class_name": "no.Such"}}, r"config\.interaction\.class_name: "),
    ],
)
def test_a_mistake_in_an_interaction_is_told_with_file_and_field_and_no_value(
    kind: Any, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^a\.yaml: {problem}|^a\.yaml: config: .*{problem}") as caught:
        build_interaction(kind, config, "it", "a.yaml")
    assert "hunter2" not in str(caught.value)


async def test_concurrent_sessions_have_separate_instances() -> None:
    async with make_toolset(gsm8k=Gsm8kInteraction({})) as toolset:
        scores: dict[int, float] = {}

        async def rollout(truth: int) -> None:
            async with toolset.open(Task(feedback_args={"ground_truth": truth})) as session:
                scores[truth] = (await session.feedback(make_chat(f"#### {truth if truth % 2 else 0}"))).score

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for truth in range(1, 65):
                    tasks.start_soon(rollout, truth)
        interaction = toolset.interactions["gsm8k"]
    assert scores == {truth: float(truth % 2) for truth in range(1, 65)}
    assert isinstance(interaction, Gsm8kInteraction) and interaction._instances == {}


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"messages": 3}', '{"messages": [{"content": "no role"}]}'])
async def test_a_call_with_wrong_arguments_is_invalid(arguments: str) -> None:
    async with make_toolset(one=Recorder({})) as toolset, toolset.open(Task()) as session:
        result = await session.call(ToolCall("c", "feedback_one", arguments))
    assert result.outcome is Outcome.INVALID
    assert result.reward is None


@pytest.mark.parametrize(
    ("turn", "outcome", "reason"),
    [
        (RuntimeError("no"), Outcome.UNAVAILABLE, "no"),
        (TimeoutError("slow"), Outcome.TIMEOUT, "slow"),
        ("hang", Outcome.TIMEOUT, "0.2 s"),
    ],
)
async def test_a_turn_that_fails_or_is_late_gives_no_reward_by_either_door(
    turn: Any, outcome: Outcome, reason: str
) -> None:
    interaction = Recorder({"turn": turn})
    toolset = FeedbackToolset({"one": interaction}, timeouts_s={"one": 0.2})
    call = ToolCall("c", "feedback_one", json.dumps({"messages": make_chat("a")}))
    async with Gateway([Source("one", toolset)]) as gateway, gateway.open(Task(feedback="one")) as session:
        feedback = await session.feedback(make_chat("a"))
        result = await session.call(call, Context(audience="loop"))
    assert (feedback.outcome, result.outcome) == (outcome, outcome) and reason in str(feedback.reason)
    assert result.reward is None and session.rewards == [] and interaction.count("finalize") == 1


@pytest.mark.parametrize("end", ["hang", RuntimeError("stuck")])
async def test_an_interaction_whose_end_hangs_or_fails_is_left_after_its_time_and_counted(
    end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "CLOSE_TIMEOUT_S", 0.05)
    async with make_toolset(one=Recorder({"finalize": end})) as toolset:
        with anyio.fail_after(60):
            async with toolset.open(Task(feedback="one")):
                pass
    assert toolset.counts["one", "finalize_failed"] == 1


async def test_a_cancelled_rollout_is_finalized() -> None:
    interaction = Recorder({"turn": "hang"})

    async def rollout(toolset: FeedbackToolset) -> None:
        async with toolset.open(Task(feedback="one")) as session:
            await session.feedback(make_chat("a"))

    with anyio.fail_after(60):
        async with make_toolset(one=interaction) as toolset, anyio.create_task_group() as tasks:
            tasks.start_soon(rollout, toolset)
            await interaction.entered.wait()
            tasks.cancel_scope.cancel()
    assert interaction.count("finalize") == 1


async def test_a_session_can_be_closed_twice_by_other_tasks() -> None:
    interaction = Recorder({})
    toolset = make_toolset(one=interaction)
    session = FeedbackSession(toolset, "one", only_named=True)
    with anyio.fail_after(60):
        await session.feedback(make_chat("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.close)
            tasks.start_soon(session.close)
    assert interaction.count("finalize") == 1
    with pytest.raises(SessionError, match="closed"):
        await session.feedback(make_chat("a"))


async def test_leaving_the_toolset_closes_all_interactions_even_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interaction_toolset, "CLOSE_TIMEOUT_S", 0.05)
    broken, stuck, working = Recorder({"aclose": RuntimeError("no")}), Recorder({"aclose": "hang"}), Recorder({})
    with anyio.fail_after(60):
        async with make_toolset(broken=broken, stuck=stuck, working=working) as toolset:
            pass
    assert (broken.closed, stuck.closed, working.closed) == (1, 1, 1)
    assert toolset.counts["broken", "close_failed"] == 1


async def test_blocking_methods_run_in_worker_threads() -> None:
    interaction = PlainInteraction({})
    async with (
        make_toolset(one=interaction) as toolset,
        toolset.open(Task(feedback="one", feedback_args={"a": 1})) as session,
    ):
        feedback = await session.feedback(make_chat("a"))
    assert (feedback.message, feedback.score, feedback.done) == ("2 messages", 1.0, True)
    assert threading.get_ident() not in interaction.threads

"""Tests of the toolset of interactions: choice by name, turns, deadlines, and finalizing exactly once."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio
import pytest

from gateway.errors import SessionError
from gateway.feedback import conversation
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import FeedbackSession, FeedbackToolset
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


async def test_a_turn_beyond_its_deadline_is_a_timeout_and_not_the_policys_failure() -> None:
    interaction = Recorder({"turn": "hang"})
    late = FeedbackToolset({"one": interaction}, timeouts_s={"one": 0.05})
    with anyio.fail_after(60):
        async with late as toolset, toolset.open(Task(feedback="one")) as session:
            feedback = await session.feedback(make_chat("a"))
    assert feedback.outcome is Outcome.TIMEOUT and "0.05 s" in str(feedback.reason)
    assert interaction.count("finalize") == 1


async def test_an_interaction_that_fails_gives_no_reward_by_either_door() -> None:
    toolset = make_toolset(one=Recorder({"turn": RuntimeError("no")}))
    call = ToolCall("c", "feedback_one", json.dumps({"messages": make_chat("a")}))
    async with Gateway([Source("one", toolset)]) as gateway, gateway.open(Task(feedback="one")) as session:
        feedback = await session.feedback(make_chat("a"))
        result = await session.call(call, Context(audience="loop"))
    assert (feedback.outcome, result.outcome) == (Outcome.UNAVAILABLE, Outcome.UNAVAILABLE)
    assert result.reward is None
    assert session.rewards == []


async def test_an_interaction_whose_end_hangs_is_left_after_its_time_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "CLOSE_TIMEOUT_S", 0.05)
    async with make_toolset(one=Recorder({"finalize": "hang"})) as toolset:
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


async def test_leaving_the_toolset_closes_all_interactions_even_if_one_fails() -> None:
    broken, working = Recorder({"aclose": RuntimeError("no")}), Recorder({})
    async with make_toolset(broken=broken, working=working) as toolset:
        pass
    assert (broken.closed, working.closed) == (1, 1)
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

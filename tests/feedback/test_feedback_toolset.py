"""Interactions are chosen by name, asked turn by turn, and finalized once, whatever happens."""

from __future__ import annotations

import re
import threading
from typing import Any

import anyio
import pytest

from gateway.errors import SessionError
from gateway.feedback import conversation
from gateway.feedback import toolset as module
from gateway.feedback.entry import Declared
from gateway.feedback.gsm8k import RIGHT, WRONG, Gsm8kInteraction
from gateway.feedback.toolset import FeedbackSession, FeedbackToolset
from gateway.types import Outcome, Task, Text, ToolCall
from tests.feedback.interactions import OlderInteraction, PlainInteraction, Recorder, answers, asking


def of(**interactions: Any) -> FeedbackToolset:
    return FeedbackToolset(interactions)


async def test_each_interaction_is_a_schema_that_only_the_loop_sees() -> None:
    async with of(gsm8k=Gsm8kInteraction({}), other=Recorder({})) as toolset:
        assert [(spec.name, spec.audience) for spec in toolset.specs] == [
            ("feedback_gsm8k", "loop"),
            ("feedback_other", "loop"),
        ]
        assert toolset.specs[0].parameters["required"] == ["messages"]


async def test_a_session_that_names_none_talks_to_gsm8k() -> None:
    toolset, task = of(other=Recorder({}), gsm8k=Gsm8kInteraction({})), Task(feedback_args={"ground_truth": "42"})
    async with toolset, toolset.open(task) as session:
        wrong = await session.feedback(answers("#### 41"))
        right = await session.feedback(answers("#### 41", "#### 42"))
    assert (wrong.message, wrong.score, wrong.done) == (WRONG, 0.0, False)
    assert (right.message, right.score, right.done, dict(right.metadata)) == (RIGHT, 1.0, True, {})


async def test_a_session_that_names_one_gets_it_and_its_arguments_without_the_name() -> None:
    chosen, other = Recorder({}), Recorder({})
    task = Task(feedback_args={"name": "chosen", "level": 3})
    async with of(chosen=chosen, gsm8k=other) as toolset, toolset.open(task) as session:
        await session.feedback(answers("a"))
    assert chosen.seen == [{"level": 3}, {"level": 3}]
    assert other.log == []


async def test_the_only_interaction_needs_no_name() -> None:
    async with of(mine=Recorder({})) as toolset, toolset.open(Task()) as session:
        assert (await session.feedback(answers("a"))).score == 0.5


async def test_an_unknown_name_refuses_the_session_and_tells_the_known_ones() -> None:
    async with of(one=Recorder({}), two=Recorder({})) as toolset:
        with pytest.raises(SessionError, match=r"named 'three'; known: one, two"):
            async with toolset.open(Task(feedback="three")):
                pytest.fail("it opened")
        with pytest.raises(SessionError, match=r"no interaction is named; known: one, two"):
            async with toolset.open(Task(feedback_args={"ground_truth": 1})):
                pytest.fail("it opened")
        async with toolset.open(Task()) as session:
            with pytest.raises(SessionError, match="known: one, two"):
                await session.feedback(answers("a"))


@pytest.mark.parametrize("taken", ["instance_id", "messages"])
async def test_an_argument_that_the_gateway_gives_itself_is_refused(taken: str) -> None:
    async with of(one=Recorder({})) as toolset:
        with pytest.raises(SessionError, match=taken):
            async with toolset.open(Task(feedback_args={taken: "x"})):
                pytest.fail("it opened")


async def test_a_named_interaction_starts_at_once_and_an_unnamed_one_when_it_is_asked() -> None:
    interaction = Recorder({})
    async with of(gsm8k=interaction) as toolset:
        async with toolset.open(Task(feedback="gsm8k")):
            assert interaction.count("start") == 1
        async with toolset.open(Task()) as session:
            assert interaction.count("start") == 1
            await session.feedback(answers("a"))
            await session.feedback(answers("a", "b"))
            assert interaction.count("start") == 2
    assert interaction.count("finalize") == 2


async def test_what_never_started_is_never_finalized() -> None:
    interaction = Recorder({})
    async with of(gsm8k=interaction) as toolset, toolset.open(Task()):
        pass
    assert interaction.log == []


async def test_the_interaction_may_name_its_instance_itself() -> None:
    interaction = Recorder({"id": "my own"})
    async with of(one=interaction) as toolset, toolset.open(Task(feedback="one")) as session:
        await session.feedback(answers("a"))
    assert interaction.log[1:] == [("turn", "my own"), ("finalize", "my own")]


async def test_many_sessions_at_once_have_their_own_instances() -> None:
    async with of(gsm8k=Gsm8kInteraction({})) as toolset:
        scores: dict[int, float] = {}

        async def rollout(truth: int) -> None:
            async with toolset.open(Task(feedback_args={"ground_truth": truth})) as session:
                scores[truth] = (await session.feedback(answers(f"#### {truth if truth % 2 else 0}"))).score

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for truth in range(1, 65):
                    tasks.start_soon(rollout, truth)
        interaction = toolset.interactions["gsm8k"]
    assert scores == {truth: float(truth % 2) for truth in range(1, 65)}
    assert isinstance(interaction, Gsm8kInteraction) and interaction._instances == {}


async def test_a_call_by_schema_gives_what_feedback_gives() -> None:
    interaction = Recorder({"returns": (True, "Good.", 0.75, {"n": 1})})
    async with of(one=interaction) as toolset, toolset.open(Task()) as session:
        result = await session.call(asking("one", answers("a")))
        assert await session.finish() == {}, "a turn's score is not counted again at the end"
    assert (result.text, result.outcome, result.reward, result.done) == ("Good.", Outcome.OK, 0.75, True)
    assert dict(result.metrics) == {"n": 1}


@pytest.mark.parametrize("arguments", ["", "[]", "{", '{"messages": 3}', '{"messages": [{"content": "no role"}]}'])
async def test_a_call_that_does_not_fit_is_told_how_to_mend_it(arguments: str) -> None:
    async with of(one=Recorder({})) as toolset, toolset.open(Task()) as session:
        result = await session.call(ToolCall("c", "feedback_one", arguments))
    assert result.outcome is Outcome.INVALID
    assert result.reward is None


async def test_a_session_that_named_one_offers_no_other() -> None:
    async with of(one=Recorder({}), two=Recorder({})) as toolset, toolset.open(Task(feedback="one")) as session:
        assert [spec.name for spec in session.specs] == ["feedback_one"]
        assert (await session.call(asking("two", answers("a")))).outcome is Outcome.INVALID


async def test_an_exception_in_an_interaction_is_not_the_policys_fault() -> None:
    interaction = Recorder({"turn": RuntimeError("the database is gone")})
    async with of(one=interaction) as toolset:
        async with toolset.open(Task(feedback="one")) as session:
            heard = await session.feedback(answers("a"))
            result = await session.call(asking("one", answers("a")))
        assert toolset.counts["one", "unavailable"] == 2
    assert heard.outcome is Outcome.UNAVAILABLE
    assert re.fullmatch(r"RuntimeError: the database is gone \(.*interactions\.py:\d+\)", heard.reason or "")
    assert result.reward is None
    assert interaction.count("finalize") == 1


async def test_a_turn_beyond_its_deadline_times_out_and_is_finalized() -> None:
    interaction = Recorder({"turn": "hang"})
    async with FeedbackToolset({"one": interaction}, timeouts_s={"one": 0.05}) as toolset:
        with anyio.fail_after(10):
            async with toolset.open(Task(feedback="one")) as session:
                heard = await session.feedback(answers("a"))
    assert heard.outcome is Outcome.TIMEOUT
    assert "0.05 s" in str(heard.reason)
    assert interaction.count("finalize") == 1


async def test_a_timeout_that_the_interaction_raises_is_one() -> None:
    async with of(one=Recorder({"turn": TimeoutError("slow")})) as toolset, toolset.open(Task()) as session:
        assert (await session.feedback(answers("a"))).outcome is Outcome.TIMEOUT


async def test_a_start_that_fails_refuses_the_session_and_is_finalized() -> None:
    interaction = Recorder({"start": ValueError("no such level")})
    async with of(one=interaction) as toolset:
        with pytest.raises(SessionError, match="'one' could not start: ValueError: no such level"):
            async with toolset.open(Task(feedback="one")):
                pytest.fail("it opened")
        assert toolset.counts["one", "start_failed"] == 1
    assert [what for what, _ in interaction.log] == ["start", "finalize"]


async def test_a_start_that_hangs_refuses_the_session_within_the_deadline() -> None:
    interaction = Recorder({"start": "hang"})
    async with FeedbackToolset({"one": interaction}, timeouts_s={"one": 0.05}) as toolset:
        with anyio.fail_after(10), pytest.raises(SessionError, match="within"):
            async with toolset.open(Task(feedback="one")):
                pytest.fail("it opened")
    assert interaction.count("finalize") == 1


async def test_a_late_start_that_fails_is_not_tried_again() -> None:
    interaction = Recorder({"start": ValueError("no such level"), "finalize": KeyError("unknown")})
    async with of(one=interaction) as toolset:
        async with toolset.open(Task()) as session:
            first = await session.feedback(answers("a"))
            second = await session.feedback(answers("a"))
        assert toolset.counts["one", "finalize_failed"] == 0
    assert (first.outcome, second.outcome) == (Outcome.UNAVAILABLE, Outcome.UNAVAILABLE)
    assert [what for what, _ in interaction.log] == ["start", "finalize"]


async def test_a_cancelled_rollout_is_finalized() -> None:
    interaction = Recorder({"turn": "hang"})

    async def rollout(toolset: FeedbackToolset) -> None:
        async with toolset.open(Task(feedback="one")) as session:
            await session.feedback(answers("a"))

    with anyio.fail_after(10):
        async with of(one=interaction) as toolset, anyio.create_task_group() as tasks:
            tasks.start_soon(rollout, toolset)
            await interaction.entered.wait()
            tasks.cancel_scope.cancel()
    assert interaction.count("finalize") == 1


async def test_a_finalize_that_fails_is_counted_and_breaks_nothing() -> None:
    async with of(one=Recorder({"finalize": RuntimeError("stuck")})) as toolset:
        async with toolset.open(Task(feedback="one")) as session:
            heard = await session.feedback(answers("a"))
        assert toolset.counts["one", "finalize_failed"] == 1
    assert heard.outcome is Outcome.OK


async def test_a_finalize_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "CLOSE_S", 0.05)
    async with of(one=Recorder({"finalize": "hang"})) as toolset:
        with anyio.fail_after(10):
            async with toolset.open(Task(feedback="one")):
                pass
        assert toolset.counts["one", "finalize_failed"] == 1


async def test_closing_waits_for_the_turn_that_runs_and_any_task_may_close() -> None:
    interaction = Recorder({})
    toolset = of(one=interaction)
    session = FeedbackSession(toolset, "one", only=True)
    with anyio.fail_after(10):
        await session.feedback(answers("a"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.close)
            tasks.start_soon(session.close)
    assert interaction.count("finalize") == 1
    with pytest.raises(SessionError, match="closed"):
        await session.feedback(answers("a"))


async def test_a_turn_that_outlives_its_session_starts_nothing() -> None:
    interaction = Recorder({})
    session = FeedbackSession(of(one=interaction), "one", only=True)
    talk = session.conversation("one")
    await session.close()
    assert (await talk.turn(answers("a"))).outcome is Outcome.UNAVAILABLE
    assert interaction.log == []


async def test_leaving_the_toolset_closes_every_interaction_even_after_one_that_fails() -> None:
    broken, sound = Recorder({"aclose": RuntimeError("no")}), Recorder({})
    async with of(broken=broken, sound=sound) as toolset:
        pass
    assert (broken.closed, sound.closed) == (1, 1)
    assert toolset.counts["broken", "close_failed"] == 1


async def test_an_interaction_that_never_closes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    stuck, sound = Recorder({"aclose": "hang"}), Recorder({})
    with anyio.fail_after(10):
        async with of(stuck=stuck, sound=sound):
            pass
    assert (stuck.closed, sound.closed) == (1, 1)


async def test_methods_that_are_not_async_run_in_worker_threads() -> None:
    interaction = PlainInteraction({})
    async with of(one=interaction) as toolset, toolset.open(Task(feedback="one", feedback_args={"a": 1})) as session:
        heard = await session.feedback(answers("a"))
    assert (heard.message, heard.score, heard.done) == ("2 messages", 1.0, True)
    assert threading.get_ident() not in interaction.threads


async def test_an_interaction_of_the_older_form_loads_without_a_name_and_behaves() -> None:
    toolset = FeedbackToolset.from_entries([Declared(OlderInteraction)])
    assert list(toolset.interactions) == ["older"]
    async with toolset:
        args = {"query": "What is 40 + 2?", "ground_truth": "42"}
        async with toolset.open(Task(feedback_args=args)) as session:
            wrong = await session.feedback([{"role": "user", "content": "It is 41"}])
            right = await session.feedback([{"role": "user", "content": "It is 41, no, 42."}])
    assert (wrong.score, wrong.done, right.score, right.done) == (0.0, False, 1.0, True)
    assert right.parts == (Text("Your response is correct!"),)

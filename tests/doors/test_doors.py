"""One body of tests for every way to a gateway: results are equal whichever way they came."""

from __future__ import annotations

import json
from dataclasses import replace

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.errors import SessionError
from gateway.session import AnySession
from gateway.types import Context, Outcome, Task, Text, ToolCall, ToolResult
from tests.doors.kit import SEVERAL, call, sources
from tests.doors.ways import Door, in_process

SOLVED = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "#### 42"}]


def said(result: ToolResult) -> ToolResult:
    """A result without its times, which no two runs share."""
    return replace(result, elapsed_s=0.0, timing={})


async def test_specs_are_lossless(door: Door) -> None:
    async with door(sources) as gateway:
        specs = {spec.name: spec for spec in gateway.specs}
        assert list(specs) == [
            *("add", "several", "facts", "fails", "remember", "judge"),
            *("pure_add", "feedback_gsm8k", "feedback_scripted"),
        ]
        assert specs["add"].parameters["properties"]["b"] == {
            "type": "integer",
            "default": 0,
            "description": "the second",
        }
        assert specs["pure_add"].hints.pure and not specs["add"].hints.pure
        assert specs["feedback_gsm8k"].audience == "loop" and specs["add"].owner == "kit"


async def test_a_session_offers_what_its_task_chose(door: Door) -> None:
    async with door(sources) as gateway, gateway.open(Task(tools=("add", "judge"))) as session:
        assert [spec.name for spec in session.specs] == ["add", "judge"]
        refused = await session.call(call("facts"))
        assert refused.outcome is Outcome.INVALID and "Available tools: add, judge" in refused.text


async def test_every_kind_of_part_arrives_in_its_order(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        assert (await session.call(call("several"))).parts == SEVERAL


async def test_every_field_of_a_result_arrives(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        assert said(await session.call(call("facts"))) == ToolResult(
            (Text("facts"),),
            Outcome.OK,
            reward=0.5,
            done=True,
            structured={"deep": [1, None, {"ä": 2.5}]},
            metrics={"tokens": 7},
            reason="because",
            meta={"trace": "kept"},
        )


async def test_failures_read_the_same(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        failed = await session.call(call("fails"))
        assert failed.outcome is Outcome.ERROR and "no such luck" in failed.text
        wrong = await session.call(call("add", '{"a": "one"}'))
        assert wrong.outcome is Outcome.INVALID and "Expected: {a: integer, b: integer (optional)}" in wrong.text
        broken = await session.call(call("add", '{"a": '))
        assert broken.outcome is Outcome.INVALID and "not valid JSON" in broken.text
        unknown = await session.call(call("ad"))
        assert unknown.outcome is Outcome.INVALID and "There is no tool named 'ad'" in unknown.text


async def test_half_a_character_costs_only_its_own_call(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        calls = [call("add", '{"a": 1}'), call("add", '{"a": "\ud800"}'), call("add", '{"a": 2}')]
        results = await session.calls(calls)
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.INVALID, Outcome.OK]


async def test_many_calls_keep_their_order(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        calls = [call("add", f'{{"a": {place}}}', f"c{place}") for place in range(50)]
        results = await session.calls(calls)
        assert [result.text for result in results] == [str(place) for place in range(50)]
        assert await session.calls([]) == []


async def test_state_belongs_to_one_session(door: Door) -> None:
    async with door(sources) as gateway, gateway.open() as one, gateway.open() as other:
        await one.call(call("remember", '{"word": "a"}'))
        assert (await one.call(call("remember", '{"word": "b"}'))).text == '["a", "b"]'
        assert (await other.call(call("remember", '{"word": "c"}'))).text == '["c"]'
        assert one.id != other.id


async def test_rewards_of_calls_turns_and_the_end_are_collected(door: Door) -> None:
    task = Task(create={"judge": {"first": "so"}}, feedback="gsm8k", feedback_args={"ground_truth": "42"})
    async with door(sources) as gateway:
        session = await gateway.begin(task)
        result = await session.call(call("judge", '{"word": "good"}', "j1"))
        assert (result.text, result.reward, result.metrics) == ("so good", 0.25, {"words": 2})
        await session.feedback(SOLVED)
        assert await session.finish() == {"judge": 2.0}
        assert await session.finish() == {"judge": 2.0}
        await session.close()
        rewards = [(reward.source, reward.value, reward.kind) for reward in session.rewards]
        assert rewards == [("judge", 0.25, "call"), ("gsm8k", 1.0, "feedback"), ("judge", 2.0, "end")]


async def test_feedback_answers_the_last_turn(door: Door) -> None:
    task = Task(feedback="gsm8k", feedback_args={"ground_truth": "42"})
    async with door(sources) as gateway, gateway.open(task) as session:
        wrong = await session.feedback([{"role": "assistant", "content": "#### 41"}])
        assert (wrong.done, wrong.score, wrong.outcome) == (False, 0.0, Outcome.OK)
        assert "incorrect" in wrong.message
        right = await session.feedback(SOLVED)
        assert (right.done, right.score, right.message) == (True, 1.0, "Your response is correct!")


async def test_a_tool_for_the_loop_is_hidden_from_the_policy(door: Door) -> None:
    async with door(sources) as gateway, gateway.open(Task(feedback="scripted")) as session:
        arguments = '{"messages": [{"role": "assistant", "content": "hm"}]}'
        hidden = await session.call(call("feedback_scripted", arguments))
        assert hidden.outcome is Outcome.INVALID and "There is no tool named" in hidden.text
        heard = await session.call(call("feedback_scripted", arguments), Context(audience="loop"))
        assert (heard.text, heard.outcome) == ("go on", Outcome.OK)


async def test_what_cannot_be_opened_says_why(door: Door) -> None:
    async with door(sources) as gateway:
        with pytest.raises(SessionError, match=r"no tool named 'sub'; offered are: add"):
            async with gateway.open(Task(tools=("sub",))):
                pass
        with pytest.raises(SessionError, match="no interaction named 'nobody'"):
            async with gateway.open(Task(feedback="nobody")):
                pass


async def test_a_closed_session_takes_no_calls(door: Door) -> None:
    async with door(sources) as gateway:
        session = await gateway.begin(Task())
        await session.close()
        await session.close()
        with pytest.raises(SessionError, match="closed"):
            await session.call(call("add", '{"a": 1}'))


async def test_many_sessions_work_side_by_side(door: Door) -> None:
    async def roll(place: int) -> None:
        async with gateway.open() as session:
            calls = [call("remember", f'{{"word": "{place}.{turn}"}}') for turn in range(3)]
            seen.extend([(await session.call(one)).text for one in calls])

    seen: list[str] = []
    async with door(sources) as gateway:
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for place in range(20):
                    tasks.start_soon(roll, place)
    words = [[f"{place}.{turn}" for turn in range(upto)] for place in range(20) for upto in (1, 2, 3)]
    assert sorted(seen) == sorted(str(one).replace("'", '"') for one in words)


async def direct(calls: list[ToolCall]) -> list[ToolResult]:
    async with in_process(sources) as gateway, gateway.open() as session:
        return [said(result) for result in await session.calls(calls)]


ARGUMENTS = st.one_of(
    st.text(max_size=40),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "word"]), inner),
        max_leaves=6,
    ).map(lambda value: json.dumps(value)),
)
CALLS = st.lists(
    st.builds(ToolCall, st.text(max_size=5), st.sampled_from(["add", "facts", "?"]), ARGUMENTS), max_size=4
)


@pytest.fixture
async def opened(door: Door) -> AnySession:
    async with door(sources) as gateway, gateway.open() as session:
        yield session


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
async def test_whatever_a_policy_writes_reads_the_same_through_every_door(
    opened: AnySession, calls: list[ToolCall]
) -> None:
    assert [said(result) for result in await opened.calls(calls)] == await direct(calls)

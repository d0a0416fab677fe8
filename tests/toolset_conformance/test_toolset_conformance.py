"""One test body over every kind of gateway: the results must be equal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.errors import SessionError
from gateway.large_json import LARGE
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Outcome, Task, Text, ToolResult
from gateway.wire import to_plain
from tests.toolset_conformance.gateway_kinds import OpenGateway
from tests.toolset_conformance.sample_tools import ALL_PARTS, NOT_JSON, facts, make_call, sample_sources

SOLVED = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "#### 42"}]


def without_times(result: ToolResult) -> ToolResult:
    """A result without its times, which differ between runs."""
    return replace(result, elapsed_s=0.0, timing={})


async def test_specs_are_lossless(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
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


async def test_all_part_types_keep_their_order(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        assert (await session.call(make_call("several"))).parts == ALL_PARTS


async def test_all_result_fields_are_preserved(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        assert without_times(await session.call(make_call("facts"))) == await facts()


@pytest.mark.parametrize("beside", ["", "x" * 2 * LARGE], ids=["small", "large"])
async def test_values_that_json_lacks_are_the_same_everywhere_and_at_any_size(
    open_tool_gateway: OpenGateway, beside: str
) -> None:
    def odd() -> ToolResult:
        """Values that JSON lacks."""
        values = {"values": [make() for make, _ in NOT_JSON], "beside": beside}
        return ToolResult((Text("odd"),), structured=values, metrics=values, meta=values)

    def make_sources() -> list[Source]:
        return [Source("odd", NativeToolset([FunctionTool(odd)]))]

    plain = {"values": [value for _, value in NOT_JSON], "beside": beside}
    async with open_tool_gateway(make_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("odd"))
    assert [to_plain(value) for value in (result.structured, result.metrics, result.meta)] == [plain] * 3


async def test_failures_have_the_same_text(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        failed = await session.call(make_call("fails"))
        assert failed.outcome is Outcome.ERROR and "no such luck" in failed.text
        wrong = await session.call(make_call("add", '{"a": "one"}'))
        assert wrong.outcome is Outcome.INVALID and "Expected: {a: integer, b: integer (optional)}" in wrong.text
        broken = await session.call(make_call("add", '{"a": '))
        assert broken.outcome is Outcome.INVALID and "not valid JSON" in broken.text
        for arguments in ('""', "[]", "1", "null", "NaN", "[" * 50_000):
            assert (await session.call(make_call("add", arguments))).outcome is Outcome.INVALID
        unknown = await session.call(make_call("ad"))
        assert unknown.outcome is Outcome.INVALID and "There is no tool named 'ad'" in unknown.text


async def test_lone_surrogate_fails_only_its_own_call(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        calls = [make_call("add", '{"a": 1}'), make_call("add", '{"a": "\ud800"}'), make_call("add", '{"a": 2}')]
        results = await session.calls(calls)
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.INVALID, Outcome.OK]


async def test_many_calls_keep_their_order(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        calls = [make_call("add", f'{{"a": {place}}}', f"c{place}") for place in range(50)]
        results = await session.calls(calls)
        assert [result.text for result in results] == [str(place) for place in range(50)]
        assert await session.calls([]) == []


async def test_state_belongs_to_one_session(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway, gateway.open() as first, gateway.open() as second:
        await first.call(make_call("remember", '{"word": "a"}'))
        assert (await first.call(make_call("remember", '{"word": "b"}'))).text == '["a", "b"]'
        assert (await second.call(make_call("remember", '{"word": "c"}'))).text == '["c"]'
        assert first.id != second.id


async def test_rewards_of_calls_feedback_and_end_are_collected(open_gateway: OpenGateway) -> None:
    task = Task(create={"judge": {"first": "so"}}, feedback="gsm8k", feedback_args={"ground_truth": "42"})
    async with open_gateway(sample_sources) as gateway:
        session = await gateway.begin(task)
        result = await session.call(make_call("judge", '{"word": "good"}', "j1"))
        assert (result.text, result.reward, result.metrics) == ("so good", 0.25, {"words": 2})
        await session.feedback(SOLVED)
        assert await session.finish() == {"judge": 2.0}
        assert await session.finish() == {"judge": 2.0}
        await session.close()
        rewards = [(reward.source, reward.value, reward.kind) for reward in session.rewards]
        assert rewards == [("judge", 0.25, "call"), ("gsm8k", 1.0, "feedback"), ("judge", 2.0, "end")]


async def test_failure_to_open_a_session_is_explained(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
        with pytest.raises(SessionError, match=r"no tool named 'sub'; offered are: add"):
            async with gateway.open(Task(tools=("sub",))):
                pass
        with pytest.raises(SessionError, match="no interaction named 'nobody'"):
            async with gateway.open(Task(feedback="nobody")):
                pass


async def test_closed_session_refuses_calls(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
        session = await gateway.begin(Task())
        await session.close()
        await session.close()
        with pytest.raises(SessionError, match="closed"):
            await session.call(make_call("add", '{"a": 1}'))

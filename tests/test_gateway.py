"""End-to-end tests of a gateway with native tools."""

from __future__ import annotations

import json
from dataclasses import replace

import anyio
import pytest

from gateway.config.models import Limits
from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Outcome, Task, ToolCall
from tests.toolset_conformance.sample_tools import add, remember


async def hang() -> None:
    """Never answers."""
    await anyio.sleep_forever()


def source(*functions: object, key: str = "native", **limits: float) -> Source:
    toolset = NativeToolset([FunctionTool(function, owner=key) for function in functions])  # type: ignore[arg-type]
    return Source(key, LimitedToolset(toolset, Limits(**limits)))  # type: ignore[arg-type]


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("c1", name, json.dumps(arguments))


async def test_function_receives_arguments_of_its_annotated_types() -> None:
    async with Gateway([source(add, remember)]) as gateway, gateway.open() as session:
        result = await session.call(call("add", a=1, b=2))
        assert (result.text, result.outcome) == ("3", Outcome.OK)
        assert [spec.name for spec in session.specs] == ["add", "remember"]


async def test_session_state_belongs_to_one_rollout() -> None:
    async with Gateway([source(remember)]) as gateway, gateway.open() as first, gateway.open() as second:
        await first.call(call("remember", word="a"))
        assert (await first.call(call("remember", word="b"))).text == '["a", "b"]'
        assert (await second.call(call("remember", word="c"))).text == '["c"]'


async def test_invalid_arguments_are_explained_to_the_policy() -> None:
    async with Gateway([source(add)]) as gateway, gateway.open() as session:
        wrong = await session.call(call("add", a="one"))
        assert wrong.outcome is Outcome.INVALID
        assert '"one" is not of type "integer"' in wrong.text and "Expected: {a: integer" in wrong.text
        unknown = await session.call(call("ad"))
        assert unknown.outcome is Outcome.INVALID and "Available tools: add" in unknown.text


async def test_concurrent_calls_keep_their_order() -> None:
    met = anyio.Event()
    started: list[int] = []

    async def meet(place: int) -> int:
        """Answers once all three are here."""
        started.append(place)
        if len(started) == 3:
            met.set()
        await met.wait()
        return place

    async with Gateway([source(meet)]) as gateway, gateway.open() as session:
        with anyio.fail_after(60):
            results = await session.calls([call("meet", place=place) for place in (2, 0, 1)])
    assert [result.text for result in results] == ["2", "0", "1"]


async def test_closing_a_session_cancels_running_calls() -> None:
    async with Gateway([source(hang)]) as gateway:
        session = await gateway.begin(Task())
        results = []

        async def first() -> None:
            results.append(await session.call(call("hang")))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await anyio.wait_all_tasks_blocked()
                await session.close()
        assert [result.outcome for result in results] == [Outcome.CANCELLED]
        with pytest.raises(SessionError, match="closed"):
            await session.call(call("hang"))


async def test_each_late_call_of_a_session_times_out_and_the_calls_after_it_run() -> None:
    async with Gateway([source(hang, timeout_s=0.01), source(add, key="other")]) as gateway, gateway.open() as session:
        with anyio.fail_after(60):
            for _ in range(2):
                late = await session.call(call("hang"))
                assert late.outcome is Outcome.TIMEOUT and "within 0.01 s" in str(late.reason)
            assert (await session.call(call("add", a=1, b=2))).text == "3"
    assert late.elapsed_s >= 0.01


async def test_closing_a_session_cancels_the_calls_that_wait_for_their_turn() -> None:
    async with Gateway([replace(source(hang), in_order=True)]) as gateway:
        session = await gateway.begin(Task())
        results = []

        async def run() -> None:
            results.extend(await session.calls([call("hang")] * 3))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await anyio.wait_all_tasks_blocked()
                await session.close()
        assert [result.outcome for result in results] == [Outcome.CANCELLED] * 3
        with pytest.raises(SessionError, match="closed"):
            await session.calls([call("hang")] * 2)


async def test_unused_session_expires() -> None:
    async with Gateway([source(add)]) as gateway:
        session = await gateway.begin(Task(ttl_s=0.01))
        gone = anyio.Event()
        session.stack.callback(gone.set)
        with anyio.fail_after(60):
            await gone.wait()
        assert session.closed and not gateway.sessions

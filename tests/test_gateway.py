"""End-to-end tests of a gateway with native tools."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import anyio
import pytest
from anyio.lowlevel import checkpoint

from gateway.config.models import Limits
from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.limits import CircuitBreaker, LimitedToolset
from gateway.media.media_filter import MediaFilter
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.session import GatewaySession
from gateway.tool_table import Source
from gateway.types import Outcome, Task, ToolCall, ToolResult
from tests.toolset_conformance.sample_tools import add
from tests.virtual_clock import VIRTUAL_CLOCK

T = TypeVar("T")


async def hang() -> None:
    """Never answers."""
    await anyio.sleep_forever()


def source(*functions: object, key: str = "native", **limits: float) -> Source:
    toolset = NativeToolset([FunctionTool(function, owner=key) for function in functions])  # type: ignore[arg-type]
    return Source(key, LimitedToolset(toolset, Limits(**limits)), admit=None)  # type: ignore[arg-type]


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall("c1", name, json.dumps(arguments))


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


async def test_each_late_call_of_a_session_times_out_and_the_calls_after_it_run() -> None:
    async with Gateway([source(hang, timeout_s=0.01), source(add, key="other")]) as gateway, gateway.open() as session:
        with anyio.fail_after(60):
            for _ in range(2):
                late = await session.call(call("hang"))
                assert late.outcome is Outcome.TIMEOUT and "within 0.01 s" in str(late.reason)
            assert (await session.call(call("add", a=1, b=2))).text == "3"
    assert late.elapsed_s >= 0.01


async def clean_up() -> None:
    """Waits for ever, and takes a while to stop."""
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.3)


on_virtual_clock = pytest.mark.parametrize("anyio_backend", [pytest.param(("asyncio", VIRTUAL_CLOCK), id="virtual")])


def limited_source(breaker: CircuitBreaker) -> Source:
    tool = NativeToolset([FunctionTool(clean_up)])
    return Source("native", LimitedToolset(tool, Limits(timeout_s=0.5), breaker), admit=None)


@on_virtual_clock
async def test_a_call_that_is_cancelled_does_not_time_out_while_its_tool_cleans_up() -> None:
    breaker, results = CircuitBreaker(failures=1), []

    async def call_tool() -> None:
        results.append(await session.call(call("clean_up")))

    async with Gateway([limited_source(breaker)]) as gateway:
        session = await gateway.begin(Task())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_tool)
            await anyio.sleep(0.4)
            await session.close()
    assert [result.outcome for result in results] == [Outcome.CANCELLED] and not breaker.is_open


@on_virtual_clock
async def test_the_deadline_of_a_caller_holds_beside_that_of_the_tool() -> None:
    breaker, outcomes = CircuitBreaker(failures=1), []
    async with Gateway([limited_source(breaker)]) as gateway, gateway.open() as session:
        gateway.observers.append(lambda observed: outcomes.append(observed.result.outcome))
        with anyio.move_on_after(0.1) as scope:
            await session.call(call("clean_up"))
        assert scope.cancelled_caught and outcomes == [Outcome.CANCELLED] and not breaker.is_open
        with anyio.move_on_after(1):
            late = await session.call(call("clean_up"))
        assert late.outcome is Outcome.TIMEOUT and breaker.is_open


class WaitingFilter(MediaFilter):
    async def __call__(self, result: ToolResult) -> ToolResult:
        await checkpoint()
        return result


async def test_an_answer_after_the_deadline_is_not_cancelled_on_its_way() -> None:
    async def answer_late() -> str:
        """Goes on after its cancellation."""
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
        return "late"

    late = replace(source(answer_late, timeout_s=0.01), admit=WaitingFilter())
    with anyio.fail_after(60):
        async with Gateway([late]) as gateway, gateway.open() as session:
            result = await session.call(call("answer_late"))
    assert (result.outcome, result.text) == (Outcome.OK, "late")


async def close_during(session: GatewaySession, make_call: Callable[[], Awaitable[T]]) -> T:
    """What calls give under which their session is closed."""
    results = list[T]()

    async def run() -> None:
        results.append(await make_call())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            assert session.running and not results, "arguments are checked in a child process"
            await session.close()
    return results[0]


async def test_closing_a_session_cancels_the_calls_that_wait_for_their_turn() -> None:
    async with Gateway([replace(source(hang), in_order=True)]) as gateway:
        session = await gateway.begin(Task())
        results = await close_during(session, lambda: session.calls([call("hang")] * 3))
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


async def test_closing_a_session_cancels_a_call_whose_arguments_are_still_checked() -> None:
    calls: list[str] = []

    async def note(text: str) -> str:
        """Notes a text."""
        calls.append(text)
        return text

    async with Gateway([source(note)]) as gateway:
        session = await gateway.begin(Task())
        result = await close_during(session, lambda: session.call(call("note", text="a" * 70_000)))
    assert result.outcome is Outcome.CANCELLED and not calls


class HangingFilter(MediaFilter):
    async def __call__(self, result: ToolResult) -> ToolResult:
        await anyio.sleep_forever()
        return result


async def test_closing_a_session_cancels_a_call_whose_answer_is_still_filtered() -> None:
    async with Gateway([replace(source(add), admit=HangingFilter())]) as gateway:
        session = await gateway.begin(Task())
        result = await close_during(session, lambda: session.call(call("add", a=1, b=2)))
    assert result.outcome is Outcome.CANCELLED

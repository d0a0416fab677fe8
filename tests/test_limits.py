"""Tests of limits: concurrency, queue, rate, deadlines, retries, truncation and the circuit breaker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from gateway.config.models import Limits, ResultLimit
from gateway.limits import CallScope, CircuitBreaker, LimitedToolset, RateLimiter, call_scope
from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Hints, Image, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from tests.sample_images import png
from tests.virtual_clock import VIRTUAL_CLOCK


class ScriptedToolset:
    """A toolset whose only tool ends with scripted outcomes and counts its calls."""

    def __init__(self, *outcomes: Outcome, hints: Hints | None = None, result: ToolResult | None = None) -> None:
        self.specs: Sequence[ToolSpec] = (ToolSpec("act", hints=hints or Hints()),)
        self.outcomes = list(outcomes)
        self.result = result
        self.calls = self.running = self.most_running = 0
        self.go_on = anyio.Event()
        self.go_on.set()

    async def __aenter__(self) -> ScriptedToolset:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        yield self

    async def finish(self) -> Mapping[str, float]:
        return {}

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.go_on.wait()
        finally:
            self.running -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.OK
        return self.result or ToolResult((Text("done"),), outcome)


CALL = ToolCall("1", "act")


async def run_calls(limited: LimitedToolset, times: int = 1) -> list[ToolResult]:
    results: list[ToolResult] = []
    async with limited.open(Task()) as session:

        async def one() -> None:
            results.append(await session.call(CALL))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(times):
                    tasks.start_soon(one)
    return results


async def test_a_limit_below_a_session_counts_from_the_start_of_its_call_and_only_once() -> None:
    scope = CallScope(monotonic() - 100)
    scope.is_taken = True  # by the session, with a cancel scope of its own
    token = call_scope.set(scope)
    try:
        limited = LimitedToolset(ScriptedToolset(), Limits(timeout_s=50, retries=0))
        outcomes = [(await run_calls(limited))[0].outcome for _ in range(2)]
    finally:
        call_scope.reset(token)
    assert outcomes == [Outcome.TIMEOUT, Outcome.OK]


async def test_full_queue_refuses_further_calls_at_once() -> None:
    inner = ScriptedToolset()
    inner.go_on = anyio.Event()
    limited = LimitedToolset(inner, Limits(at_once=1, queue_limit=1, retries=0))
    results: list[ToolResult] = []
    async with limited.open(Task()) as session, anyio.create_task_group() as tasks:

        async def one() -> None:
            results.append(await session.call(CALL))

        for _ in range(3):
            tasks.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        assert [result.outcome for result in results] == [Outcome.UNAVAILABLE]
        assert "are waiting already" in (results[0].reason or "")
        inner.go_on.set()
    assert [result.outcome for result in results[1:]] == [Outcome.OK, Outcome.OK]


class UncancellableTool(ScriptedToolset):
    """A tool that ignores cancellation until an event is set."""

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        with anyio.CancelScope(shield=True):
            return await super().call(call, context)


async def test_call_without_a_slot_is_unavailable_not_timed_out() -> None:
    inner, results = UncancellableTool(), list[Outcome]()
    inner.go_on = anyio.Event()
    async with LimitedToolset(inner, Limits(at_once=1, timeout_s=0.05)).open(Task()) as session:

        async def one() -> None:
            results.append((await session.call(CALL)).outcome)
            inner.go_on.set()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                tasks.start_soon(one)
    assert results == [Outcome.UNAVAILABLE, Outcome.OK]
    assert inner.calls == 1 and inner.running == 0


async def test_delivered_call_without_answer_is_not_retried() -> None:
    inner = ScriptedToolset(Outcome.UNKNOWN)
    (result,) = await run_calls(LimitedToolset(inner, Limits(retries=2)))
    assert (result.outcome, inner.calls) == (Outcome.UNKNOWN, 1)


@pytest.mark.parametrize("hints", [Hints(read_only=True), Hints(idempotent=True), Hints(pure=True)])
async def test_call_declared_repeatable_is_retried(hints: Hints) -> None:
    inner = ScriptedToolset(Outcome.UNKNOWN, hints=hints)
    (result,) = await run_calls(LimitedToolset(inner, Limits(retries=2)))
    assert (result.outcome, result.attempts) == (Outcome.OK, 2)


async def test_circuit_breaker_pauses_a_failing_server_then_tries_once() -> None:
    breaker = CircuitBreaker(failures=2, pause_s=0.1)
    inner = ScriptedToolset(*[Outcome.UNKNOWN] * 3)
    limited = LimitedToolset(inner, Limits(retries=0), breaker)
    outcomes = [(await run_calls(limited))[0].outcome for _ in range(4)]
    assert outcomes == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.UNAVAILABLE, Outcome.UNAVAILABLE]
    assert inner.calls == 2 and breaker.is_open
    await anyio.sleep(0.11)
    assert (await run_calls(limited))[0].outcome is Outcome.UNKNOWN, "the try that may close the breaker again"
    assert (await run_calls(limited))[0].outcome is Outcome.UNAVAILABLE
    await anyio.sleep(0.11)
    assert [(await run_calls(limited))[0].outcome for _ in range(2)] == [Outcome.OK, Outcome.OK]


async def test_long_result_is_truncated_in_the_middle_with_a_marker() -> None:
    text = "a" * 50 + "b" * 100 + "c" * 50
    picture = Image(png())
    inner = ScriptedToolset(result=ToolResult((Text(text), picture, Text("d" * 50))))
    (result,) = await run_calls(LimitedToolset(inner, Limits(result_limit=100)))
    assert result.text == "a" * 50 + "\n[... 151 characters cut ...]\n" + "d" * 50
    assert result.parts[1] == picture and result.metrics["cut"] == 151


async def test_long_result_is_truncated_by_tokens(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    limits = Limits(result_limit=ResultLimit(tokens=4, tokenizer=str(tmp_path)))
    for text, expected, cut in (
        ("one two  three four\nfive six", "one two\n[... 2 tokens cut ...]\nfive six", 2),
        ("one two", "one two", None),
        ("word " * 20_000, "word word\n[... 19996 tokens cut ...]\nword word ", 19_996),
    ):
        (result,) = await run_calls(LimitedToolset(ScriptedToolset(result=ToolResult((Text(text),))), limits))
        assert (result.text, result.metrics.get("cut")) == (expected, cut)


async def test_cancelled_call_releases_its_slot() -> None:
    inner = ScriptedToolset()
    inner.go_on = anyio.Event()
    limited = LimitedToolset(inner, Limits(at_once=1))
    with anyio.move_on_after(0.05):
        await run_calls(limited, times=3)
    limiter = limited.limiter("act")
    assert (limiter.slots.value, limiter.waiting, inner.running) == (1, 0, 0)


@given(rate=st.floats(0.5, 200), count=st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_rate_limit_holds_in_every_second(rate: float, count: int) -> None:
    pace = RateLimiter(rate)
    starts: list[float] = []

    async def main() -> None:
        async def one() -> None:
            await pace.wait()
            starts.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(one)

    anyio.run(main, backend_options=VIRTUAL_CLOCK)
    starts.sort()
    most = max(1, int(rate))
    window_s = most / rate
    assert all(later - first >= window_s - 1e-6 for first, later in zip(starts, starts[most:], strict=False))
    assert len(starts) == count

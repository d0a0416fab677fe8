"""Places, pace, deadlines, repeats: what they let through, and what they say when they do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from gateway.config.models import Limits, ResultLimit
from gateway.limit import Breaker, Limited, Pace
from gateway.toolset import Session
from gateway.types import ALONE, Context, Hints, Image, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from tests.drawn import png


class Scripted:
    """A toolset whose only tool ends as it is told to, and that counts who came."""

    def __init__(self, *outcomes: Outcome, hints: Hints | None = None, result: ToolResult | None = None) -> None:
        self.specs: Sequence[ToolSpec] = (ToolSpec("act", hints=hints or Hints()),)
        self.outcomes = list(outcomes)
        self.result = result
        self.calls = self.running = self.most_running = 0
        self.go_on = anyio.Event()
        self.go_on.set()

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        yield self

    async def finish(self) -> Mapping[str, float]:
        return {}

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
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


async def act(limited: Limited, times: int = 1) -> list[ToolResult]:
    results: list[ToolResult] = []
    async with limited.open(Task()) as session:

        async def one() -> None:
            results.append(await session.call(CALL))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(times):
                    tasks.start_soon(one)
    return results


async def test_no_more_calls_run_at_once_than_there_are_places() -> None:
    inner = Scripted()
    results = await act(Limited(inner, Limits(at_once=3)), times=20)
    assert inner.most_running == 3
    assert [result.outcome for result in results] == [Outcome.OK] * 20


async def test_a_full_queue_refuses_at_once_and_says_so() -> None:
    inner = Scripted()
    inner.go_on = anyio.Event()
    limited = Limited(inner, Limits(at_once=1, queue_limit=1, retries=0))
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


class Deaf(Scripted):
    """Lets go when it is told to, not when nobody waits for it any more."""

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        with anyio.CancelScope(shield=True):
            return await super().call(call, context)


async def test_a_call_that_never_got_a_place_is_unavailable_and_not_timed_out() -> None:
    inner, results = Deaf(), list[Outcome]()
    inner.go_on = anyio.Event()
    async with Limited(inner, Limits(at_once=1, timeout_s=0.05)).open(Task()) as session:

        async def one() -> None:
            results.append((await session.call(CALL)).outcome)
            inner.go_on.set()

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                tasks.start_soon(one)
    assert results == [Outcome.UNAVAILABLE, Outcome.OK]
    assert inner.calls == 1 and inner.running == 0


async def test_what_was_never_delivered_is_tried_again_and_counted() -> None:
    inner = Scripted(Outcome.UNAVAILABLE, Outcome.UNAVAILABLE)
    (result,) = await act(Limited(inner, Limits(retries=2)))
    assert (result.outcome, result.attempts, inner.calls) == (Outcome.OK, 3, 3)


async def test_what_was_delivered_without_an_answer_is_not_repeated() -> None:
    inner = Scripted(Outcome.UNKNOWN)
    (result,) = await act(Limited(inner, Limits(retries=2)))
    assert (result.outcome, inner.calls) == (Outcome.UNKNOWN, 1)


@pytest.mark.parametrize("hints", [Hints(read_only=True), Hints(idempotent=True), Hints(pure=True)])
async def test_what_is_declared_safe_to_repeat_is_repeated(hints: Hints) -> None:
    inner = Scripted(Outcome.UNKNOWN, hints=hints)
    (result,) = await act(Limited(inner, Limits(retries=2)))
    assert (result.outcome, result.attempts) == (Outcome.OK, 2)


async def test_an_operators_word_that_a_tool_is_pure_counts_as_a_hint() -> None:
    inner = Scripted(Outcome.UNKNOWN)
    limited = Limited(inner, Limits(pure=True, retries=1))
    (result,) = await act(limited)
    assert (result.outcome, limited.specs[0].hints.pure) == (Outcome.OK, True)
    assert limited.specs is limited.specs, "an unchanged listing is the same object"


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.INVALID])
async def test_a_tools_own_word_is_never_asked_twice(outcome: Outcome) -> None:
    inner = Scripted(outcome, hints=Hints(pure=True))
    (result,) = await act(Limited(inner, Limits(retries=2)))
    assert (result.outcome, inner.calls) == (outcome, 1)


async def test_a_server_that_always_fails_is_given_a_pause_and_then_one_more_try() -> None:
    breaker = Breaker(failures=2, pause_s=0.1)
    inner = Scripted(*[Outcome.UNKNOWN] * 3)
    limited = Limited(inner, Limits(retries=0), breaker)
    outcomes = [(await act(limited))[0].outcome for _ in range(4)]
    assert outcomes == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.UNAVAILABLE, Outcome.UNAVAILABLE]
    assert inner.calls == 2 and breaker.is_open
    await anyio.sleep(0.11)
    assert (await act(limited))[0].outcome is Outcome.UNKNOWN, "the try that may close the breaker again"
    assert (await act(limited))[0].outcome is Outcome.UNAVAILABLE
    await anyio.sleep(0.11)
    assert [(await act(limited))[0].outcome for _ in range(2)] == [Outcome.OK, Outcome.OK]


async def test_calls_that_were_under_way_when_a_server_died_are_one_failure() -> None:
    breaker = Breaker(failures=2, pause_s=60)
    began = anyio.current_time()
    for _ in range(8):
        breaker.record(Outcome.UNKNOWN, began - 1)
    assert breaker.admit() and not breaker.is_open
    breaker.record(Outcome.UNKNOWN, anyio.current_time())
    assert breaker.is_open and not breaker.admit(), "one that began afterwards is another"


async def test_a_long_result_is_cut_in_the_middle_with_a_marker_and_counted() -> None:
    text = "a" * 50 + "b" * 100 + "c" * 50
    picture = Image(png())
    inner = Scripted(result=ToolResult((Text(text), picture, Text("d" * 50))))
    (result,) = await act(Limited(inner, Limits(result_limit=100)))
    assert result.text == "a" * 50 + "\n[... 151 characters cut ...]\n" + "d" * 50
    assert result.parts[1] == picture and result.metrics["cut"] == 151


async def test_the_side_that_is_cut_can_be_chosen() -> None:
    inner = Scripted(result=ToolResult((Text("0123456789"),)))
    left = Limited(inner, Limits(result_limit=ResultLimit(chars=4, side="left")))
    right = Limited(inner, Limits(result_limit=ResultLimit(chars=4, side="right")))
    assert (await act(left))[0].text.endswith("6789")
    assert (await act(right))[0].text.startswith("0123\n[")


async def test_a_long_result_can_be_cut_by_the_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    text = "one two  three four\nfive six"
    limit = ResultLimit(tokens=4, tokenizer=str(tmp_path))
    (cut,) = await act(Limited(Scripted(result=ToolResult((Text(text),))), Limits(result_limit=limit)))
    assert cut.text == "one two\n[... 2 tokens cut ...]\nfive six" and cut.metrics["cut"] == 2
    (whole,) = await act(Limited(Scripted(result=ToolResult((Text("one two"),))), Limits(result_limit=limit)))
    assert whole.text == "one two" and "cut" not in whole.metrics
    (long,) = await act(Limited(Scripted(result=ToolResult((Text("word " * 20_000),))), Limits(result_limit=limit)))
    assert long.text == "word word\n[... 19996 tokens cut ...]\nword word " and long.metrics["cut"] == 19_996


async def test_cancelling_a_caller_gives_its_place_back() -> None:
    inner = Scripted()
    inner.go_on = anyio.Event()
    limited = Limited(inner, Limits(at_once=1))
    with anyio.move_on_after(0.05):
        await act(limited, times=3)
    gate = limited.gate("act")
    assert (gate.places.value, gate.waiting, inner.running) == (1, 0, 0)


@given(rate=st.floats(0.5, 200), count=st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_no_second_holds_more_starts_than_the_pace_allows(rate: float, count: int) -> None:
    pace = Pace(rate)
    starts: list[float] = []

    async def main() -> None:
        async def one() -> None:
            await pace.wait()
            starts.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(one)

    import trio.testing

    anyio.run(main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})
    starts.sort()
    most = max(1, int(rate))
    window_s = most / rate
    assert all(later - first >= window_s - 1e-6 for first, later in zip(starts, starts[most:], strict=False))
    assert len(starts) == count

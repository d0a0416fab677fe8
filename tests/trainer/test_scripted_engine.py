"""The scripted engine stops, truncates, waits, fails and counts like a real one."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from trainer.engine.base import EngineError, Generation, Sampling
from trainer.engine.scripted import DEFAULT_LOGPROB, ScriptedEngine


async def test_function_script_gets_ids_sampling_and_key() -> None:
    def script(ids: Sequence[int], sampling: Sampling, key: str) -> list[int]:
        return [len(ids), sampling.max_tokens, len(key)]

    async with ScriptedEngine(script) as engine:
        generation = await engine.generate([7, 8], Sampling(max_tokens=9), key="abc", group="g")
    assert generation == Generation((2, 9, 3), (DEFAULT_LOGPROB,) * 3, "stop")
    assert [(request.ids, request.key, request.group) for request in engine.requests] == [((7, 8), "abc", "g")]


async def test_each_key_has_its_own_answers_in_order() -> None:
    prepared = Generation((5,), (-1.0,), "length", 3, 2)
    async with ScriptedEngine({"a": [[1], prepared], "b": [EngineError("no power")]}) as engine:
        assert (await engine.generate([0], Sampling(), key="a")).ids == (1,)
        assert await engine.generate([0], Sampling(), key="a") == prepared
        for key, reason in (("a", "no more answers for 'a'"), ("b", "no power"), ("c", "no answers for 'c'")):
            with pytest.raises(EngineError, match=reason):
                await engine.generate([0], Sampling(), key=key)


@pytest.mark.parametrize(
    ("sampling", "ids", "stop"),
    [
        (Sampling(), (1, 2, 3, 4), "stop"),
        (Sampling(max_tokens=4), (1, 2, 3, 4), "stop"),
        (Sampling(max_tokens=3), (1, 2, 3), "length"),
        (Sampling(stop_ids=(2,)), (1, 2), "stop"),
        (Sampling(stop_ids=(4,), max_tokens=2), (1, 2), "length"),
    ],
)
async def test_answers_are_truncated_as_sampling_asks(sampling: Sampling, ids: tuple[int, ...], stop: str) -> None:
    async with ScriptedEngine(lambda *_: [1, 2, 3, 4]) as engine:
        generation = await engine.generate([0], sampling)
    assert (generation.ids, generation.finish_reason) == (ids, stop)


async def test_full_context_ends_the_generation_and_a_longer_prompt_raises() -> None:
    async with ScriptedEngine(lambda *_: [1, 2, 3], context_length=6) as engine:
        assert (await engine.generate([0] * 4, Sampling())).finish_reason == "length"
        with pytest.raises(EngineError, match="context of 6"):
            await engine.generate([0] * 6, Sampling())


async def test_prefixes_of_a_rollout_and_its_siblings_are_cached_until_a_publish() -> None:
    async with ScriptedEngine(lambda *_: [1, 2]) as engine:
        prompt = [5, 6, 7]
        cached = [(await engine.generate(prompt, Sampling(), key=key, group="g")).cached_tokens for key in ("a", "b")]
        cached.append((await engine.generate([*prompt, 1, 2, 8], Sampling(), key="a", group="g")).cached_tokens)
        await engine.publish({}, 4)
        after = await engine.generate(prompt, Sampling(), key="a", group="g")
    assert cached == [0, 2, 5]
    assert (after.cached_tokens, after.version) == (0, 4)


async def test_held_answer_arrives_when_its_event_is_set() -> None:
    finished: list[str] = []

    async def generate(key: str) -> None:
        await engine.generate([0], Sampling(), key=key)
        finished.append(key)

    with anyio.fail_after(60):
        async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
            slow = engine.hold("slow")
            for key in ("slow", "quick"):
                tasks.start_soon(generate, key)
            await anyio.wait_all_tasks_blocked()
            assert (finished, engine.in_flight, engine.max_concurrent) == (["quick"], 1, 2)
            slow.set()
    assert finished == ["quick", "slow"]


async def test_pause_abort_and_cancel_affect_waiting_requests() -> None:
    finished: dict[str, Generation] = {}

    async def generate(key: str) -> None:
        finished[key] = await engine.generate([0], Sampling(), key=key)

    with anyio.fail_after(60):
        async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
            engine.hold("held")
            await engine.pause()
            for key in ("held", "one", "two"):
                tasks.start_soon(generate, key)
            async with anyio.create_task_group() as cancelled_tasks:
                cancelled_tasks.start_soon(generate, "cancelled")
                await anyio.wait_all_tasks_blocked()
                cancelled_tasks.cancel_scope.cancel()
            assert (finished, engine.cancelled, engine.in_flight) == ({}, 1, 3)
            await engine.abort("one")
            await anyio.wait_all_tasks_blocked()
            assert (finished.keys(), finished["one"].finish_reason) == ({"one"}, "abort")
            await engine.resume()
            await anyio.wait_all_tasks_blocked()
            assert finished["two"].ids == (1,)
            await engine.abort()
    assert finished["held"] == Generation((), (), "abort")

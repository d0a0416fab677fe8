"""The scripted engine keeps an engine's manners: it stops, cuts, waits, fails and counts as a real one would."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.scripted import LOGPROB, ScriptedEngine


async def test_a_function_answers_from_what_it_is_asked() -> None:
    def script(ids: Sequence[int], sampling: Sampling, key: str) -> list[int]:
        return [len(ids), sampling.max_tokens, len(key)]

    async with ScriptedEngine(script) as engine:
        written = await engine.generate([7, 8], Sampling(max_tokens=9), key="abc", group="g")
    assert written == Written((2, 9, 3), (LOGPROB,) * 3, "stop")
    assert [(asked.ids, asked.key, asked.group) for asked in engine.asked] == [((7, 8), "abc", "g")]


async def test_each_key_has_its_own_answers_in_order() -> None:
    given = Written((5,), (-1.0,), "length", 3, 2)
    async with ScriptedEngine({"a": [[1], given], "b": [EngineError("no power")]}) as engine:
        assert (await engine.generate([0], Sampling(), key="a")).ids == (1,)
        assert await engine.generate([0], Sampling(), key="a") == given
        for key, says in (("a", "no more for 'a'"), ("b", "no power"), ("c", "nothing for 'c'")):
            with pytest.raises(EngineError, match=says):
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
async def test_answers_are_cut_as_sampling_says(sampling: Sampling, ids: tuple[int, ...], stop: str) -> None:
    async with ScriptedEngine(lambda *_: [1, 2, 3, 4]) as engine:
        written = await engine.generate([0], sampling)
    assert (written.ids, written.stop) == (ids, stop)


async def test_a_full_context_ends_the_turn_and_a_longer_one_is_an_error() -> None:
    async with ScriptedEngine(lambda *_: [1, 2, 3], context=6) as engine:
        assert (await engine.generate([0] * 4, Sampling())).stop == "length"
        with pytest.raises(EngineError, match="context of 6"):
            await engine.generate([0] * 6, Sampling())


async def test_what_a_rollout_or_its_siblings_had_before_is_cached_until_a_new_version() -> None:
    async with ScriptedEngine(lambda *_: [1, 2]) as engine:
        asked = [5, 6, 7]
        cached = [(await engine.generate(asked, Sampling(), key=key, group="g")).cached for key in ("a", "b")]
        cached.append((await engine.generate([*asked, 1, 2, 8], Sampling(), key="a", group="g")).cached)
        await engine.publish({}, 4)
        after = await engine.generate(asked, Sampling(), key="a", group="g")
    assert cached == [0, 2, 5]
    assert (after.cached, after.version) == (0, 4)


async def test_an_answer_that_is_held_comes_when_it_is_let_go() -> None:
    found: list[str] = []

    async def ask(key: str) -> None:
        await engine.generate([0], Sampling(), key=key)
        found.append(key)

    with anyio.fail_after(5):
        async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
            slow = engine.hold("slow")
            for key in ("slow", "quick"):
                tasks.start_soon(ask, key)
            await anyio.wait_all_tasks_blocked()
            assert (found, engine.writing, engine.most) == (["quick"], 1, 2)
            slow.set()
    assert found == ["quick", "slow"]


async def test_pause_abort_and_cancel_reach_those_who_wait() -> None:
    found: dict[str, Written] = {}

    async def ask(key: str) -> None:
        found[key] = await engine.generate([0], Sampling(), key=key)

    with anyio.fail_after(5):
        async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
            engine.hold("held")
            await engine.pause()
            for key in ("held", "one", "two"):
                tasks.start_soon(ask, key)
            async with anyio.create_task_group() as given_up:
                given_up.start_soon(ask, "cancelled")
                await anyio.wait_all_tasks_blocked()
                given_up.cancel_scope.cancel()
            assert (found, engine.cancelled, engine.writing) == ({}, 1, 3)
            await engine.abort("one")
            await anyio.wait_all_tasks_blocked()
            assert (found.keys(), found["one"].stop) == ({"one"}, "abort")
            await engine.resume()
            await anyio.wait_all_tasks_blocked()
            assert found["two"].ids == (1,)
            await engine.abort()
    assert found["held"] == Written((), (), "abort")

"""Aborting a turn in every state: generating, between requests, waiting for weights or servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.trainer.engine_sglang.engine_harness import opened
from tests.trainer.engine_sglang.fake_sglang import IDS, Fake, weights
from tests.waiting import wait_until
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang.http_client import SGLangClient
from trainer.engine.sglang.sglang_engine import SGLangEngine

NOTHING = Generation((), (), "abort")


@asynccontextmanager
async def writing(fake: Fake) -> AsyncIterator[tuple[SGLangEngine, TaskGroup, dict[str, Generation]]]:
    """And what has ended, by rollout."""
    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        yield engine, tasks, {}


async def write(
    engine: SGLangEngine, ended: dict[str, Generation], key: str, sampling: Sampling, group: str = ""
) -> None:
    ended[key] = await engine.generate(IDS, sampling, key=key, group=group)


async def test_abort_between_two_requests_ends_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that is barred was written last: a further request was to follow."""
    fake, post = Fake(), SGLangClient.post
    sampling = Sampling(max_tokens=400, banned_ids=(*range(0, 40, 4),))

    found: list[set[str]] = []
    async with writing(fake) as (engine, tasks, ended):
        begun = len(fake.bodies("/generate"))

        async def aborts(client: SGLangClient, path: str, body: object, **more: float) -> object:
            answer = await post(client, path, body, **more)  # type: ignore[arg-type]
            if path == "/generate" and len(fake.bodies("/generate")) == begun + 3:
                tasks.start_soon(abort)
                await wait_until(lambda: fake.aborted)
            return answer

        async def abort() -> None:
            await engine.abort("t/1")
            found.append({*ended})

        monkeypatch.setattr(SGLangClient, "post", aborts)
        tasks.start_soon(write, engine, ended, "t/1", sampling)
        await wait_until(lambda: found)
        assert found == [{"t/1"}]
        assert len(fake.bodies("/generate")) == begun + 3
    assert ended["t/1"].finish_reason == "abort"
    assert 0 < len(ended["t/1"].ids) == len(ended["t/1"].logprobs) < 400
    assert not {*ended["t/1"].ids} & {*sampling.banned_ids}


async def test_abort_ends_a_turn_that_waits_for_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, sent, go = Fake(), anyio.Event(), anyio.Event()
    took = fake.from_tensor

    async def slowly(body: object) -> object:
        sent.set()
        await go.wait()
        return await took(body)

    monkeypatch.setattr(fake, "from_tensor", slowly)
    async with writing(fake) as (engine, tasks, ended):
        tasks.start_soon(engine.publish, weights(1), 1)
        await sent.wait()
        for key in ("t/1", "t/2"):
            tasks.start_soon(write, engine, ended, key, Sampling(max_tokens=3))
        await anyio.wait_all_tasks_blocked()
        await engine.abort("t/1")
        await wait_until(lambda: ended)
        assert ended == {"t/1": NOTHING}
        go.set()
        await wait_until(lambda: len(ended) == 2)
    assert ended["t/2"].finish_reason == "length" and ended["t/2"].version == 1


async def test_abort_ends_a_turn_on_a_server_presumed_lost() -> None:
    """Another request of its broke; this one goes on."""
    fake = Fake(hold_at=2)
    async with writing(fake) as (engine, tasks, ended):
        tasks.start_soon(write, engine, ended, "t/1", Sampling(max_tokens=5))
        await wait_until(lambda: fake.writing)
        fake.break_down()
        tasks.start_soon(write, engine, ended, "t/2", Sampling(max_tokens=3))
        await wait_until(lambda: not engine.replicas[0].up)
        await engine.abort("t/1")
        assert ended["t/1"].finish_reason == "abort" and len(ended["t/1"].ids) == 2
        fake.start_anew()
        await wait_until(lambda: len(ended) == 2)
    assert ended["t/2"].finish_reason == "length"

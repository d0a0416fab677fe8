"""Two real servers share the work: what can be cached is, the router that SGLang has is written through."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from transformers import PreTrainedModel

from tests.sglang.policy import AGREE, EOS, PROMPT, moved, off, opened, written_on
from trainer.engine.base import Sampling, Written
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.server import Server

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from routing import SMALL, compared, router


@pytest.fixture(scope="module")
async def front(first: Server, second: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with router((first.url, second.url), tmp_path_factory.mktemp("router") / "log") as url:
        yield url


async def test_what_could_be_cached_is_on_one_server_and_on_two_and_more_than_where_they_take_turns(
    servers: tuple[Server, Server], front: str
) -> None:
    with anyio.fail_after(200):
        found = await compared([server.url for server in servers], front, replace(SMALL, groups=6, siblings=8, turns=4))
    sys.stderr.write("".join(f"{name}: {one}\n" for name, one in found.items()))
    assert found["one server"].share >= 0.95 and found["ours"].share >= 0.95
    assert found["ours"].share > found["in turn"].share + 0.05
    assert found["router"].share > found["in turn"].share
    assert found["ours"].busier is not None and found["ours"].busier <= 0.75


async def test_weights_are_published_to_each_server_behind_the_router_and_written_with_through_it(
    servers: tuple[Server, Server], front: str, policy: PreTrainedModel
) -> None:
    ended: list[tuple[int, Written]] = []

    async def write(place: int) -> None:
        sampling = Sampling(max_tokens=30, barred=(EOS,))
        ended.append((place, await engine.generate((*PROMPT, place), sampling, key=f"{place}/t/0", group=str(place))))

    async with opened(front, policy=policy) as engine:
        assert engine.capabilities.name == "sglang 0.5.23 x 2 behind a router"
        moved(policy)
        await engine.publish(policy.state_dict(), 1)
        assert engine.agreement is not None and engine.agreement.most <= AGREE
        assert [await replica.version() for replica in engine.replicas] == [1, 1]
        async with anyio.create_task_group() as tasks:
            for place in range(12):
                tasks.start_soon(write, place)
        aborted = await aborted_of(engine)
    assert {one.version for _, one in ended} == {1} and len(ended) == 12
    assert max(off(policy, (*PROMPT, place), one) for place, one in ended) <= AGREE
    assert aborted.stop == "abort" and len(aborted.ids) < 400


async def aborted_of(engine: SGLangEngine) -> Written:
    """Once more where it was told too late: the whole turn takes a second, which a busy machine may take off."""
    ended: list[Written] = []

    async def write() -> None:
        ended.append(await engine.generate(PROMPT, Sampling(max_tokens=400, barred=(EOS,)), key="a"))

    with anyio.fail_after(120):
        while not ended or (ended[-1].stop == "length" and len(ended) < 5):
            begun = len(ended)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write)
                await written_on(engine, 1)
                await engine.abort("a")
                assert len(ended) == begun + 1, "it says that it is over before it is"
    return ended[-1]

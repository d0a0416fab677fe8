"""Two real servers: prefix cache hits, and generation through SGLang's router."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from transformers import PreTrainedModel

from tests.sglang.policy import AGREE, EOS, PROMPT, moved, off, opened
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang.server_process import ServerProcess

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from routing import SMALL, compare, start_router


@pytest.fixture(scope="module")
async def front(
    first: ServerProcess, second: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    async with start_router((first.url, second.url), tmp_path_factory.mktemp("router") / "log") as url:
        yield url


async def test_prefix_cache_hits_on_two_servers_exceed_round_robin(
    servers: tuple[ServerProcess, ServerProcess], front: str
) -> None:
    with anyio.fail_after(900):
        found = await compare([server.url for server in servers], front, replace(SMALL, groups=6, siblings=8, turns=4))
    sys.stderr.write("".join(f"{name}: {one}\n" for name, one in found.items()))
    assert found["one server"].share >= 0.95 and found["ours"].share >= 0.95
    assert found["ours"].share > found["in turn"].share + 0.05
    assert found["router"].share > found["in turn"].share
    assert found["ours"].busier is not None and found["ours"].busier <= 0.75


async def test_weights_are_published_to_every_server_behind_the_router(
    servers: tuple[ServerProcess, ServerProcess], front: str, policy: PreTrainedModel
) -> None:
    ended: list[tuple[int, Generation]] = []

    async def write(place: int) -> None:
        sampling = Sampling(max_tokens=30, banned_ids=(EOS,))
        ended.append((place, await engine.generate((*PROMPT, place), sampling, key=f"{place}/t/0", group=str(place))))

    async with opened(front, policy=policy) as engine:
        assert engine.capabilities.name == "sglang 0.5.23 x 2 behind a router"
        moved(policy)
        await engine.publish(policy.state_dict(), 1)
        assert engine.agreement is not None and engine.agreement.max_difference <= AGREE
        assert [await replica.version() for replica in engine.replicas] == [1, 1]
        async with anyio.create_task_group() as tasks:
            for place in range(12):
                tasks.start_soon(write, place)
    assert {one.version for _, one in ended} == {1} and len(ended) == 12
    assert max(off(policy, (*PROMPT, place), one) for place, one in ended) <= AGREE

"""Real servers that are killed or stopped during generation: nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import psutil
import pytest
from transformers import PreTrainedModel

from tests.sglang.conftest import Lent, group_of
from tests.sglang.policy import AGREE, EOS, PROMPT, moved, off, opened, written_on
from trainer.engine.base import Generation, Sampling
from trainer.engine.sglang import health
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine

LONG = Sampling(max_tokens=440, banned_ids=(EOS,))
MANY = 6


class Writing:
    """Rollouts that are being written, each of its own prompt."""

    def __init__(self, engine: SGLangEngine, policy: PreTrainedModel) -> None:
        self.engine, self.policy = engine, policy
        self.ended: dict[int, Generation] = {}

    async def write(self, place: int) -> None:
        key, group = f"{place}/t/0", str(place)
        self.ended[place] = await self.engine.generate((*PROMPT, place), LONG, key=key, group=group)

    def over(self) -> bool:
        return bool(self.ended)

    def whole(self, version: int) -> bool:
        """Each was written once, to its end, by the weights that were published."""
        assert sorted(self.ended) == list(range(MANY))
        assert {len(one.ids) for one in self.ended.values()} == {LONG.max_tokens}
        assert {one.version for one in self.ended.values()} == {version}
        return max(off(self.policy, (*PROMPT, place), one) for place, one in self.ended.items()) <= AGREE


@asynccontextmanager
async def writing(engine: SGLangEngine, policy: PreTrainedModel) -> AsyncIterator[Writing]:
    """All of them have begun and none is over; left when all are. On a machine that is busy they may be over before
    that is seen: then it begins once more."""
    with anyio.fail_after(900):
        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                under_way = Writing(engine, policy)
                for place in range(MANY):
                    tasks.start_soon(under_way.write, place)
                await written_on(engine, MANY, over=under_way.over)
                if not under_way.over():
                    yield under_way
                    return
        raise AssertionError("all was written before it was seen to begin")


async def up(engine: SGLangEngine, place: int) -> None:
    with anyio.fail_after(900):
        while not engine.replicas[place].up:  # noqa: ASYNC110 - no event tells of it
            await anyio.sleep(0.05)


async def test_server_with_a_killed_scheduler_recovers_without_loss(
    server: ServerProcess, policy: PreTrainedModel
) -> None:
    own = Lent(server)
    async with opened(own, policy=policy) as engine:
        moved(policy)
        await engine.publish(policy.state_dict(), 1)
        async with writing(engine, policy) as written:
            group = group_of(server.pid)
            assert len(group) >= 3
            os.kill(scheduler_of(server), signal.SIGKILL)
        assert written.whole(version=1)
        assert not set(group) & set(group_of(server.pid)) and server.url == engine.replicas[0].url


async def test_turns_of_a_hanging_server_are_generated_by_another(
    servers: tuple[ServerProcess, ServerProcess], policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found out while nobody asks it for anything else, ended and started anew."""
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.5)
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 3.0)
    hangs, other = servers
    async with opened(Lent(hangs), other, policy=policy) as engine:
        moved(policy)
        await engine.publish(policy.state_dict(), 1)
        assert hangs.pid is not None
        async with writing(engine, policy) as written:
            assert min(replica.load for replica in engine.replicas) > 0
            for pid in group_of(hangs.pid):
                os.kill(pid, signal.SIGSTOP)
        assert written.whole(version=1) and not engine.replicas[0].up
        await engine.publish(policy.state_dict(), 2)
        await up(engine, 0)
        assert await engine.replicas[0].version() == 2


def scheduler_of(server: ServerProcess) -> int:
    (scheduler,) = (pid for pid in group_of(server.pid) if psutil.Process(pid).name().startswith("sglang::sch"))
    return scheduler

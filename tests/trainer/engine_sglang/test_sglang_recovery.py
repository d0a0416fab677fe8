"""Servers that hang or run out of memory: their turns move, or the error has a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from starlette.responses import JSONResponse

from tests.trainer.engine_sglang.engine_harness import opened, serving, start_turn
from tests.trainer.engine_sglang.fake_sglang import IDS, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import Sampling
from trainer.engine.sglang import health, replica
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(replica, "EXTERNAL_RECOVERY_S", 20.0)


async def test_turns_of_a_hanging_server_are_generated_by_another() -> None:
    first, second = Fake(hold_at=1), Fake()
    async with opened(first, second) as engine, anyio.create_task_group() as tasks:
        await engine.publish(weights(1), 1)
        ended = start_turn(tasks, engine, Sampling(max_tokens=4))
        await wait_until(lambda: first.writing)
        first.hung = True
        await wait_until(lambda: ended)
        assert not engine.replicas[0].up and engine.replicas[0].load == 0
    assert len(ended[0].ids) == 4 and ended[0].version == 1
    assert second.bodies("/generate")[-1]["input_ids"] == list(IDS)


async def test_slow_server_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 2.0)
    fake = Fake(hold_at=1)
    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        ended = start_turn(tasks, engine, Sampling(max_tokens=4))
        await wait_until(lambda: fake.writing)
        beats = fake.told["/server_info"]
        await wait_until(lambda: fake.told["/server_info"] >= beats + 20)
        assert engine.replicas[0].up and not ended
        fake.released.set()
        await wait_until(lambda: ended)
    assert len(fake.bodies("/generate")) == 3  # Two to find out what it is.


async def test_own_server_lost_before_its_first_answer_is_restarted(tmp_path: Path) -> None:
    fake = Fake()
    async with serving(fake):
        fake.break_down()
        async with SGLangEngine([Ours(fake, tmp_path)], TensorSync()) as engine:
            assert len((await engine.generate(IDS, Sampling(max_tokens=2))).ids) == 2


async def test_own_server_killed_again_during_a_weight_sync_recovers(tmp_path: Path) -> None:
    fake = Fake()
    broken = {"/update_weights_from_tensor": JSONResponse({"detail": "killed"}, 500)}
    async with serving(fake):
        own = Ours(fake, tmp_path)
        async with SGLangEngine([own], TensorSync(), reference=TrainerReference(reads(weights(1)))) as engine:
            await engine.publish(weights(1), 1)
            fake.break_down()
            own.alive, own.then = False, [lambda: fake.fails.update(broken)]
            with anyio.fail_after(60):
                written = await engine.generate(IDS, Sampling(max_tokens=2))
    assert written.version == 1 and fake.version == "1" and own.starts == 2


class Ours(ServerProcess):
    """One of ours, and it is as it says; `then` comes right after a start."""

    alive = True

    def __init__(self, fake: Fake, folder: Path) -> None:
        super().__init__(folder, log=folder / "log")
        self.fake, self.starts = fake, 0
        self.then: list[Callable[[], object]] = []

    async def __aenter__(self) -> TrainerReference:
        self.url = self.fake.url
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def restart(self) -> None:
        self.starts += 1
        self.fake.start_anew()
        if self.then:
            self.then.pop(0)()

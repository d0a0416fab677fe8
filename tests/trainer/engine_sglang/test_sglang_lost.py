"""Servers that hang, or have no memory: whoever waits is helped by another, or told what to turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from starlette.responses import JSONResponse

from tests.trainer.engine_sglang.asked import opened, serving, until
from tests.trainer.engine_sglang.fake_sglang import IDS, Fake, reads, weights
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang import pulse, replica
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.memory import REMEDY
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.server import Server
from trainer.engine.sglang.wire import Gone


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 0.02)
    monkeypatch.setattr(pulse, "QUIET_S", 0.2)
    monkeypatch.setattr(replica, "BACK_S", 20.0)


async def test_what_a_server_that_hangs_was_writing_is_written_by_another() -> None:
    first, second = Fake(hold_at=1), Fake()
    ended: list[Written] = []

    async def write() -> None:
        ended.append(await engine.generate(IDS, Sampling(max_tokens=4), key="a"))

    async with opened(first, second) as engine, anyio.create_task_group() as tasks:
        await engine.publish(weights(1), 1)
        tasks.start_soon(write)
        await until(lambda: first.writing)
        first.hung = True
        await until(lambda: ended)
        assert not engine.replicas[0].up and engine.replicas[0].load == 0
    assert len(ended[0].ids) == 4 and ended[0].version == 1
    assert second.bodies("/generate")[-1]["input_ids"] == list(IDS)


async def test_a_server_that_only_takes_long_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "QUIET_S", 2.0)
    fake, ended = Fake(hold_at=1), []

    async def write() -> None:
        ended.append(await engine.generate(IDS, Sampling(max_tokens=4)))

    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(write)
        await until(lambda: fake.writing)
        beats = fake.told["/server_info"]
        await until(lambda: fake.told["/server_info"] >= beats + 20)
        assert engine.replicas[0].up and not ended
        fake.released.set()
        await until(lambda: ended)
    assert len(fake.bodies("/generate")) == 3  # Two to find out what it is.


async def test_a_server_that_nobody_waits_for_is_not_asked() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        await engine.generate(IDS, Sampling(max_tokens=4))
        told = fake.told["/server_info"]
        await anyio.sleep(0.2)  # ten pulses, if there were any
        assert fake.told["/server_info"] <= told + 1  # One was on its way.


async def test_a_server_of_ours_that_is_lost_before_it_was_asked_what_it_is_is_started_again(tmp_path: Path) -> None:
    fake = Fake()
    async with serving(fake):
        fake.break_down()
        async with SGLangEngine([Ours(fake, tmp_path)], ByTensors()) as engine:
            assert len((await engine.generate(IDS, Sampling(max_tokens=2))).ids) == 2


async def test_a_server_of_ours_that_is_killed_again_while_it_takes_in_weights_comes_back_all_the_same(
    tmp_path: Path,
) -> None:
    fake = Fake()
    broken = {"/update_weights_from_tensor": JSONResponse({"detail": "killed"}, 500)}
    async with serving(fake):
        own = Ours(fake, tmp_path)
        async with SGLangEngine([own], ByTensors(), own=Own(reads(weights(1)))) as engine:
            await engine.publish(weights(1), 1)
            fake.break_down()
            own.alive, own.then = False, [lambda: fake.fails.update(broken)]
            with anyio.fail_after(20):
                written = await engine.generate(IDS, Sampling(max_tokens=2))
    assert written.version == 1 and fake.version == "1" and own.starts == 2


class Ours(Server):
    """One of ours, and it is as it says; `then` comes right after a start."""

    alive = True

    def __init__(self, fake: Fake, folder: Path) -> None:
        super().__init__(folder, log=folder / "log")
        self.fake, self.starts = fake, 0
        self.then: list[Callable[[], object]] = []

    async def __aenter__(self) -> Own:
        self.url = self.fake.url
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def restart(self) -> None:
        self.starts += 1
        self.fake.start_anew()
        if self.then:
            self.then.pop(0)()


async def test_a_server_without_memory_is_told_with_what_to_turn() -> None:
    fake = Fake()
    async with opened(fake) as engine:
        fake.fails["/generate"] = JSONResponse({"detail": "CUDA out of memory. Tried to allocate 2 GiB"}, 500)
        with pytest.raises(Gone, match="mem-fraction-static") as told:
            await engine.generate(IDS, Sampling())
    assert REMEDY in str(told.value)


def test_the_last_words_of_a_server_of_ours_are_told_with_what_to_turn(tmp_path: Path) -> None:
    server = Server(tmp_path, log=tmp_path / "log")
    server.log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n" + "  File ...\n" * 1000)
    assert server.short
    assert REMEDY in str(server.fault("is lost")) and isinstance(server.fault("is lost"), EngineError)
    server.log.write_text("KV cache pool is full. Retract requests.\n")
    assert not server.short and REMEDY not in str(server.fault("is lost"))

"""Weights that change during generation: which version sampled which ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from tests.trainer.engine_sglang.engine_harness import opened, serving, start_turn
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang import replica as replicas
from trainer.engine.sglang.http_client import ConnectionBroken
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync


@pytest.mark.parametrize("tied", [False, True])
async def test_recovered_server_gets_the_published_weights_not_newer_ones(tied: bool) -> None:
    fake, live = Fake(), weights(1)
    given = live | ({"head": live[NAME]} if tied else {})
    async with opened(fake, finds=lambda ids, _: reads(live)(ids)) as engine:
        for version in (1, 2):
            live[NAME].copy_(weights(version)[NAME])
            await engine.publish(given, version)
            live[NAME].add_(torch.randn(live[NAME].shape))  # As an optimizer does, in place.
            fake.start_anew()
            written = await engine.generate(IDS, Sampling(max_tokens=3))
            assert written.version == version and fake.weights[NAME].equal(weights(version)[NAME])
            assert engine.agreement and engine.agreement.is_exact


async def test_release_without_versions_per_id_is_refused_for_async_updates() -> None:
    problem = r"SGLang 0\.5\.17 at http.* does not report which weights .*use 0\.5\.23, or `mode: synchronous`"
    async with serving(Fake("0.5.17")) as urls:
        with pytest.raises(EngineError, match=problem):
            async with SGLangEngine(urls, TensorSync(), publishes_mid_turn=True):
                pass
    async with opened(Fake("0.5.23"), publishes_mid_turn=True) as engine:
        assert engine.replicas[0].features.version_spans


class Slow(TensorSync):
    """Servers have the weights a while before it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.go = anyio.Event(), anyio.Event()

    async def send(self, *arguments: Any) -> None:
        await super().send(*arguments)
        self.sent.set()
        await self.go.wait()


@pytest.mark.parametrize("in_place", [False, True])
async def test_turn_that_starts_during_a_publish_uses_the_new_weights(in_place: bool) -> None:
    fake, way = Fake(), Slow()
    async with serving(fake) as urls, SGLangEngine(urls, way, in_place=in_place) as engine:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.publish, weights(1), 1)
                await way.sent.wait()
                asked = len(fake.bodies("/generate"))
                ended = start_turn(tasks, engine, Sampling(max_tokens=3))
                for _ in range(20):
                    await checkpoint()
                assert len(fake.bodies("/generate")) == asked
                way.go.set()
    assert ended[0].versions == (1, 1, 1)
    assert fake.bodies("/generate")[-1]["extra_key"].endswith(" 1")


async def test_waiting_turns_continue_on_the_first_recovered_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "EXTERNAL_RECOVERY_S", 20.0)
    first, second = Fake(), Fake()
    async with opened(first, second) as engine, anyio.create_task_group() as tasks:
        first.break_down()
        second.break_down()
        ended = start_turn(tasks, engine, Sampling(max_tokens=3))
        await wait_until(lambda: not any(replica.up for replica in engine.replicas))
        second.start_anew()
        await wait_until(lambda: ended)
        assert not engine.replicas[0].up and len(ended[0].ids) == 3
        tasks.cancel_scope.cancel()


async def test_broken_connection_repeats_the_request_under_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server writes what it heard, is told to stop, and refuses to write again under the same name."""
    fake = Fake(hold_at=1)
    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        client = engine.replicas[0].client
        post, broken = client.post, list[str]()

        async def breaks(path: str, body: dict[str, object], *, within: float = 30) -> object:
            if path == "/generate" and not broken:
                broken.append(str(body["rid"]))
                tasks.start_soon(partial(post, path, body, within=within))
                await wait_until(lambda: fake.writing)
                raise ConnectionBroken("the line broke")
            if path == "/abort_request" and body["rid"] in broken:
                told.set()  # And it goes on all the same: what it computes, it computes.
                return None
            return await post(path, body, within=within)

        told = anyio.Event()
        monkeypatch.setattr(client, "post", breaks)
        ended = start_turn(tasks, engine, Sampling(max_tokens=4))
        await wait_until(lambda: fake.writing == 2)
        assert told.is_set()
        fake.released.set()
        await wait_until(lambda: ended)
    first, second = [body["rid"] for body in fake.bodies("/generate") if body.get("rid")]
    assert first == broken[0] != second and engine.counters["servers_lost"] == 0
    assert ended[0].finish_reason == "length"

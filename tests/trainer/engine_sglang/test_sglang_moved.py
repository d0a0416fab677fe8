"""Weights that move while turns are written: who has which, and which wrote what, stays known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from tests.trainer.engine_sglang.asked import opened, serving, until
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, VOCABULARY, Fake, reads, weights
from trainer.engine.base import EngineError, Sampling, Written
from trainer.engine.sglang import replica as replicas
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.publish.way import Target
from trainer.engine.sglang.wire import Broken


@pytest.mark.parametrize("tied", [False, True])
async def test_a_server_that_comes_back_is_given_what_was_published_though_the_trainer_learned_since(
    tied: bool,
) -> None:
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
            assert engine.agreement and engine.agreement.exact


async def test_weights_that_moved_while_it_was_paused_are_no_reason_to_doubt_those_published() -> None:
    live = weights(1)
    async with opened(Fake(), finds=lambda ids, _: reads(live)(ids)) as engine:
        await engine.pause()
        await engine.publish(live, 1)
        live[NAME].add_(torch.randn(live[NAME].shape))
        await engine.resume()
        assert engine.agreement and engine.agreement.exact


@pytest.mark.parametrize("release", ["0.5.9", "0.5.17"])
async def test_a_release_that_tells_one_version_of_a_turn_is_refused_where_turns_go_on_under_new_weights(
    release: str,
) -> None:
    problem = rf"SGLang {release} at http.* does not tell which weights .*use 0\.5\.23, or `mode: synchronous`"
    async with serving(Fake(release)) as urls:
        with pytest.raises(EngineError, match=problem):
            async with SGLangEngine(urls, ByTensors(), flows=True):
                pass
    async with opened(Fake("0.5.23"), flows=True) as engine:
        assert engine.replicas[0].facts.spans


@pytest.mark.parametrize("in_place", [False, True])
async def test_such_a_release_is_given_no_weights_while_it_writes(in_place: bool) -> None:
    fake = Fake("0.5.17", hold_at=2)
    async with opened(fake, in_place=in_place) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=4))
        await until(lambda: fake.writing)
        with pytest.raises(EngineError, match="does not tell which weights wrote which part of a turn"):
            await engine.publish(weights(1), 1)
        assert fake.version == "default" and fake.going.is_set()
        fake.released.set()
        await until(lambda: not engine.replicas[0].load)
        await engine.publish(weights(1), 1)
    assert fake.version == "1"


class Slow(ByTensors):
    """Servers have the weights a while before it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.go = anyio.Event(), anyio.Event()

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        await super().send(targets, weights, version, flush)
        self.sent.set()
        await self.go.wait()


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_turn_that_would_begin_while_weights_are_sent_begins_with_them(in_place: bool) -> None:
    fake, way = Fake(), Slow()
    ended: list[Written] = []

    async def write() -> None:
        ended.append(await engine.generate(IDS, Sampling(max_tokens=3)))

    async with serving(fake) as urls, SGLangEngine(urls, way, in_place=in_place) as engine:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.publish, weights(1), 1)
                await way.sent.wait()
                asked = len(fake.bodies("/generate"))
                tasks.start_soon(write)
                for _ in range(20):
                    await checkpoint()
                assert len(fake.bodies("/generate")) == asked
                way.go.set()
    assert ended[0].versions == (1, 1, 1)
    assert fake.bodies("/generate")[-1]["extra_key"].endswith(" 1")


async def test_a_turn_taken_up_again_over_new_weights_reads_nothing_of_those_before() -> None:
    """An id that was taken back is drawn anew by another request, which says which weights it is for."""
    fake, half = Fake(hold_at=2), tuple(range(0, VOCABULARY, 2))

    def keys() -> list[str]:
        return [body["extra_key"] for body in fake.bodies("/generate") if body.get("extra_key")]

    async with opened(fake, in_place=True) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.generate, IDS, Sampling(max_tokens=60, barred=half))
        await until(lambda: fake.writing)
        before = keys()
        await engine.publish(weights(1), 3)
        fake.hold_at = None
        fake.released.set()
    after = keys()[len(before) :]
    assert all(key.endswith(" -1") for key in before) and after and all(key.endswith(" 3") for key in after)


async def test_whoever_waits_goes_on_with_the_first_server_that_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "BACK_S", 20.0)
    first, second = Fake(), Fake()
    ended: list[Written] = []

    async def write() -> None:
        ended.append(await engine.generate(IDS, Sampling(max_tokens=3)))

    async with opened(first, second) as engine, anyio.create_task_group() as tasks:
        first.break_down()
        second.break_down()
        tasks.start_soon(write)
        await until(lambda: not any(replica.up for replica in engine.replicas))
        second.start_anew()
        await until(lambda: ended)
        assert not engine.replicas[0].up and len(ended[0].ids) == 3
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("aborted", [False, True])
async def test_where_the_line_breaks_it_is_asked_again_by_another_name(
    aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes what it heard, is told to stop, and refuses to write again under the same name."""
    fake, ended = Fake(hold_at=1), list[Written]()

    async def write() -> None:
        ended.append(await engine.generate(IDS, Sampling(max_tokens=4), key="a"))

    async with opened(fake) as engine, anyio.create_task_group() as tasks:
        wire = engine.replicas[0].wire
        post, broken = wire.post, list[str]()

        async def breaks(path: str, body: dict[str, object], *, within: float = 30) -> object:
            if path == "/generate" and not broken:
                broken.append(str(body["rid"]))
                tasks.start_soon(partial(post, path, body, within=within))
                await until(lambda: fake.writing)
                raise Broken("the line broke")
            if path == "/abort_request" and body["rid"] in broken:
                told.set()  # And it goes on all the same: what it computes, it computes.
                return None
            return await post(path, body, within=within)

        told = anyio.Event()
        monkeypatch.setattr(wire, "post", breaks)
        tasks.start_soon(write)
        await until(lambda: fake.writing == 2)
        assert told.is_set()
        if aborted:
            await engine.abort("a")
        fake.released.set()
        await until(lambda: ended)
    first, second = [body["rid"] for body in fake.bodies("/generate") if body.get("rid")]
    assert first == broken[0] != second and engine.counted["servers_lost"] == 0
    assert ended[0].stop == ("abort" if aborted else "length")

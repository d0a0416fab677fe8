"""Whichever way weights take: a server that is lost on it is left out, and has the whole of them in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.responses import JSONResponse
from torch import Tensor

from tests.trainer.engine_sglang.asked import serving, until
from tests.trainer.engine_sglang.fake_group import Grouped
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang import replica
from trainer.engine.sglang.engine import SGLangEngine
from trainer.engine.sglang.own import Own
from trainer.engine.sglang.publish import group
from trainer.engine.sglang.publish.disk import ByDisk
from trainer.engine.sglang.publish.group import ByGroup
from trainer.engine.sglang.publish.tensors import ByTensors
from trainer.engine.sglang.publish.way import Target, Way

TAKES = {"tensors": "tensor", "disk": "disk", "group": "distributed"}


def way_of(name: str, folder: Path) -> Way:
    (folder / "config.json").write_text("{}")
    return ByDisk(folder) if name == "disk" else ByGroup() if name == "group" else ByTensors()


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("place", [0, 1])
async def test_an_update_that_breaks_off_half_way_is_made_again(name: str, place: int, tmp_path: Path) -> None:
    """The server was started anew in the midst of it, and has half of the weights, or none."""
    fakes = [Grouped(), Grouped()]
    dies, lives = fakes[place], fakes[1 - place]
    async with serving(*fakes) as urls, SGLangEngine(urls, way_of(name, tmp_path)) as engine:
        with anyio.fail_after(30):
            await engine.publish(weights(1), 1)
            for path in (f"/update_weights_from_{TAKES[name]}", "/pause_generation"):
                dies.fails[path] = JSONResponse({"detail": "killed"}, 500)
            await engine.publish(weights(2), 2)
            assert lives.version == "2" and not engine.replicas[place].up
            dies.start_anew()
            await until(lambda: engine.replicas[place].up)
    for fake in fakes:
        assert fake.version == "2" and fake.weights[NAME].equal(weights(2)[NAME])


async def test_a_process_group_that_breaks_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds out at times before any server says so."""
    fakes, whole, broken = [Grouped(), Grouped()], group.dist.broadcast, list[int]()

    def breaks(*given: Any, **more: Any) -> Any:
        if not broken:
            broken.append(1)
            raise RuntimeError("Connection closed by peer")
        return whole(*given, **more)

    monkeypatch.setattr(group.dist, "broadcast", breaks)
    async with serving(*fakes) as urls, SGLangEngine(urls, ByGroup(), own=Own(reads(weights(1)))) as engine:
        with anyio.fail_after(30):
            await engine.publish(weights(1), 1)
    assert broken and all(fake.weights[NAME].equal(weights(1)[NAME]) for fake in fakes)
    assert len(fakes[0].bodies("/init_weights_update_group")) == 2


async def test_what_a_server_of_a_group_refuses_is_asked_of_it_again_as_another_may_have_died() -> None:
    first, second = Grouped(), Grouped()
    async with serving(first, second) as urls, SGLangEngine(urls, ByGroup()) as engine:
        with anyio.fail_after(30):
            refused = JSONResponse({"success": False, "message": "Connection closed by peer"})
            first.fails["/update_weights_from_distributed"] = refused
            with pytest.raises(EngineError, match="Connection closed by peer"):
                await engine.publish(weights(1), 1)
    assert len(first.bodies("/update_weights_from_distributed")) == 4


class Strange(ByTensors):
    def __init__(self) -> None:
        super().__init__()
        self.strange = False

    async def send(self, targets: Sequence[Target], weights: Mapping[str, Tensor], version: int, flush: bool) -> None:
        if self.strange:
            raise RuntimeError("nobody thought of it")
        await super().send(targets, weights, version, flush)


async def test_a_server_that_cannot_be_had_back_for_whatever_reason_ends_what_waits_for_it_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica, "BACK_S", 20.0)
    first, way = Fake(), Strange()
    async with serving(first) as urls, SGLangEngine(urls, way) as engine:
        with anyio.fail_after(30):
            await engine.publish(weights(1), 1)
            way.strange = True
            first.start_anew()
            with pytest.raises(EngineError, match="could not be had back: RuntimeError: nobody thought of it"):
                await engine.generate(IDS, Sampling(max_tokens=2))

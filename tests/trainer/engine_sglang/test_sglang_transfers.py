"""Weight transfers by tensors, disk and process group, with servers that fail during them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from starlette.responses import JSONResponse
from torch import Tensor

from tests.trainer.engine_sglang.engine_harness import serving
from tests.trainer.engine_sglang.fake_group import Grouped
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import EngineError, Sampling
from trainer.engine.sglang import replica
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync import process_group, tensors
from trainer.engine.sglang.weight_sync.base import WeightSync
from trainer.engine.sglang.weight_sync.disk import DiskSync
from trainer.engine.sglang.weight_sync.flat_bucket import FlatBucket
from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference

TAKES = {"tensors": "tensor", "disk": "disk", "group": "distributed"}


def way_of(name: str, folder: Path) -> WeightSync:
    (folder / "config.json").write_text("{}")
    return DiskSync(folder) if name == "disk" else ProcessGroupSync() if name == "group" else TensorSync()


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("place", [0, 1])
async def test_interrupted_weight_update_is_repeated(name: str, place: int, tmp_path: Path) -> None:
    """The server was started anew in the midst of it, and has half of the weights, or none."""
    fakes = [Grouped(), Grouped()]
    dies, lives = fakes[place], fakes[1 - place]
    async with serving(*fakes) as urls, SGLangEngine(urls, way_of(name, tmp_path)) as engine:
        with anyio.fail_after(60):
            await engine.publish(weights(1), 1)
            for path in (f"/update_weights_from_{TAKES[name]}", "/pause_generation"):
                dies.fails[path] = JSONResponse({"detail": "killed"}, 500)
            await engine.publish(weights(2), 2)
            assert lives.version == "2" and not engine.replicas[place].up
            dies.start_anew()
            await wait_until(lambda: engine.replicas[place].up)
    for fake in fakes:
        assert fake.version == "2" and fake.weights[NAME].equal(weights(2)[NAME])


async def test_bytes_of_a_bucket_are_made_once_for_all_servers_and_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, made, pickle = [Fake(info={"tp_size": 2}), Fake(info={"tp_size": 2})], [0], tensors._pickle

    def count(flat: FlatBucket) -> bytes:
        made[0] += 1
        return pickle(flat)

    monkeypatch.setattr(tensors, "_pickle", count)
    async with serving(*fakes) as urls, SGLangEngine(urls, TensorSync()) as engine:
        await engine.publish(weights(1), 1)
    for fake in fakes:
        assert fake.weights[NAME].equal(weights(1)[NAME])
        (body,) = fake.bodies("/update_weights_from_tensor")
        first, second = body["serialized_named_tensors"]
        assert first == second
    assert made == [1]


async def test_broken_process_group_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds out at times before any server says so."""
    fakes, whole, broken = [Grouped(), Grouped()], process_group.dist.broadcast, list[int]()

    def breaks(*given: Any, **more: Any) -> Any:
        if not broken:
            broken.append(1)
            raise RuntimeError("Connection closed by peer")
        return whole(*given, **more)

    monkeypatch.setattr(process_group.dist, "broadcast", breaks)
    async with (
        serving(*fakes) as urls,
        SGLangEngine(urls, ProcessGroupSync(), reference=TrainerReference(reads(weights(1)))) as engine,
    ):
        with anyio.fail_after(60):
            await engine.publish(weights(1), 1)
    assert broken and all(fake.weights[NAME].equal(weights(1)[NAME]) for fake in fakes)
    assert len(fakes[0].bodies("/init_weights_update_group")) == 2


async def test_process_group_sends_a_bucket_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, whole, sizes = Grouped(), process_group.dist.broadcast, list[int]()

    def count(tensor: Tensor, **more: Any) -> Any:
        sizes.append(tensor.nbytes)
        return whole(tensor, **more)

    monkeypatch.setattr(process_group.dist, "broadcast", count)
    sent = {**weights(1), "odd": torch.arange(3).bfloat16(), "turned": torch.randn(3, 2).t()}
    async with serving(fake) as urls, SGLangEngine(urls, ProcessGroupSync()) as engine:
        with anyio.fail_after(60):
            await engine.publish(sent, 1)
    assert sizes == [sum(tensor.nbytes for tensor in sent.values())]
    assert all(fake.weights[name].equal(tensor) for name, tensor in sent.items())


class Strange(TensorSync):
    def __init__(self) -> None:
        super().__init__()
        self.strange = False

    async def send(self, *arguments: Any) -> None:
        if self.strange:
            raise RuntimeError("nobody thought of it")
        await super().send(*arguments)


async def test_unrecoverable_server_fails_only_the_turns_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "EXTERNAL_RECOVERY_S", 20.0)
    first, way = Fake(), Strange()
    async with serving(first) as urls, SGLangEngine(urls, way) as engine:
        with anyio.fail_after(60):
            await engine.publish(weights(1), 1)
            way.strange = True
            first.start_anew()
            with pytest.raises(EngineError, match="could not be recovered: RuntimeError: nobody thought of it"):
                await engine.generate(IDS, Sampling(max_tokens=2))


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(("dtypes", "sent"), [("bfloat16 bfloat16", "bfloat16"), ("bfloat16 float32", "float32")])
async def test_servers_get_matrices_in_their_dtype_if_all_have_the_same(
    name: str, dtypes: str, sent: str, tmp_path: Path
) -> None:
    given = {NAME: weights(1)[NAME], "vector": torch.arange(3.0), "half": torch.ones(2, 2).half()}
    fakes = [Grouped(info={"dtype": dtype}) for dtype in dtypes.split()]
    async with serving(*fakes) as urls, SGLangEngine(urls, way_of(name, tmp_path)) as engine:
        with anyio.fail_after(60):
            await engine.publish(given, 1)
        expected = given | {NAME: given[NAME].to(getattr(torch, sent))}
        assert engine.published_bytes == sum(tensor.nbytes for tensor in expected.values())
    for fake in fakes:
        for key, tensor in expected.items():
            assert fake.weights[key].dtype == tensor.dtype and fake.weights[key].equal(tensor), key

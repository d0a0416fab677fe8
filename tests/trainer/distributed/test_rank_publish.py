"""Weights go from ranks to servers bucket by bucket, and rank 0 never holds more than one; so do those of before."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio import to_thread
from torch import Tensor

from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks
from tests.trainer.engine_sglang.engine_harness import serving
from tests.trainer.engine_sglang.fake_group import Grouped
from tests.trainer.engine_sglang.fake_sglang import IDS
from tests.trainer.engine_sglang.test_sglang_transfers import way_of
from tests.trainer.policy.tiny_policies import tiny_model
from tests.waiting import wait_until
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed import sharded_policy
from trainer.distributed.rank_commands import LeaderChannel
from trainer.engine.base import PolicyWeights, Sampling
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync import disk, process_group, tensors
from trainer.policy.settings import LoraSettings, UpdateSettings

BUCKET = 3000
"""Bytes; the largest tensor has 3,200."""
UPDATES = {"full": UpdateSettings(), "lora": UpdateSettings(lora=LoraSettings(rank=4))}


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    with running_ranks(2, tmp_path_factory.mktemp("ranks")) as channel:
        yield channel


class Gathered:
    """Counts the bytes of gathered tensors that are alive."""

    def __init__(self) -> None:
        self.now = self.most = self.tensors = self.total = 0

    def __call__(self, value: Tensor, *, keep: bool = True) -> Tensor:
        whole: Tensor = self.gather(value, keep=keep)
        self.now += whole.nbytes
        self.total += whole.nbytes
        self.tensors += 1
        self.most = max(self.most, self.now)
        weakref.finalize(whole.untyped_storage(), self._free, whole.nbytes)
        return whole

    def _free(self, size: int) -> None:
        self.now -= size

    gather = staticmethod(sharded_policy.gather_tensor)


@asynccontextmanager
async def two_servers(way: str, folder: Path) -> AsyncIterator[tuple[SGLangEngine, list[Grouped]]]:
    fakes = [Grouped(), Grouped()]
    async with serving(*fakes) as urls, SGLangEngine(urls, way_of(way, folder)) as engine:
        with anyio.fail_after(120):
            yield engine, fakes


@pytest.mark.parametrize(("way", "kind"), [("tensors", "full"), ("disk", "lora"), ("group", "full")])
async def test_servers_get_the_ranks_weights_and_rank_0_holds_one_bucket(
    channel: LeaderChannel, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, kind: str
) -> None:
    gathered = Gathered()
    for module in (disk, process_group, tensors):
        monkeypatch.setattr(module, "BUCKET", BUCKET)
    policy, updater = await to_thread.run_sync(make_updater, channel, model, AlgorithmSettings(), UPDATES[kind])
    alone, updater_alone = make_updater(None, model, AlgorithmSettings(), UPDATES[kind])

    def train(seed: int) -> dict[str, Any]:
        batch = random_batch(tiny_model(tie_word_embeddings=True), seed)
        updater.train_step(batch)
        updater_alone.train_step(batch)
        return {name: value.clone() for name, value in alone.weights.items() if name != "lm_head.weight"}

    expected = await to_thread.run_sync(train, 0)
    async with two_servers(way, tmp_path) as (engine, fakes):
        monkeypatch.setattr(sharded_policy, "gather_tensor", gathered)
        await engine.publish(policy.weights, 1)
        assert all(has_weights(fake, expected) for fake in fakes)
        later = await to_thread.run_sync(train, 1)
        fakes[1].start_anew()
        async with anyio.create_task_group() as tasks:  # At the same time, so that some ask this server.
            for key in "abcd":
                tasks.start_soon(partial(engine.generate, IDS, Sampling(max_tokens=2), key=key))
        await wait_until(lambda: fakes[1].version == "1" and engine.replicas[1].up)
        assert has_weights(fakes[1], expected), "it has the published weights, not those that were trained since"
        await engine.publish(policy.weights, 2)
        assert all(has_weights(fake, later) for fake in fakes)
    sizes = {name: value.nbytes for name, value in expected.items()}
    assert gathered.tensors > 2 * len(sizes) and sum(sizes.values()) > 8 * BUCKET
    if kind == "full":
        assert gathered.most <= max(BUCKET, *sizes.values())


def test_ranks_gather_adapters_alone_and_measure_it_where_it_happens(
    channel: LeaderChannel, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = Gathered()
    policy, updater = make_updater(channel, model, AlgorithmSettings(), UPDATES["lora"])
    alone, updater_alone = make_updater(None, model, AlgorithmSettings(), UPDATES["lora"])
    batch = random_batch(tiny_model(tie_word_embeddings=True), 3)
    updater.train_step(batch)
    updater_alone.train_step(batch)
    monkeypatch.setattr(sharded_policy, "gather_tensor", gathered)
    weights, weights_alone = policy.weights, alone.weights
    assert isinstance(weights, PolicyWeights) and isinstance(weights_alone, PolicyWeights)
    adapters, expected = weights.adapters(), weights_alone.adapters()
    assert adapters is not None and expected is not None and adapters.shape == expected.shape
    assert adapters.keys() == expected.keys() and gathered.tensors == len(expected)
    assert all(torch.allclose(value, expected[name], rtol=0, atol=1e-6) for name, value in adapters.items())
    before = weights.gather_s
    assert before > 0
    dict(weights)
    assert weights.gather_s > before and policy.adapter_shape == alone.adapter_shape
    full, _ = make_updater(channel, model, AlgorithmSettings(), UPDATES["full"])
    assert isinstance(full.weights, PolicyWeights) and full.weights.adapters() is None


@pytest.mark.parametrize("kind", UPDATES)
async def test_ranks_send_what_they_compute_with(
    channel: LeaderChannel, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    update = UPDATES[kind].model_copy(update={"dtype": "bfloat16"})
    policy, _ = await to_thread.run_sync(make_updater, channel, model, AlgorithmSettings(), update)
    alone, _ = make_updater(None, model, AlgorithmSettings(), update)
    expected = {name: value for name, value in alone.weights.items() if name != "lm_head.weight"}
    gathered = Gathered()
    monkeypatch.setattr(sharded_policy, "gather_tensor", gathered)
    async with two_servers("tensors", tmp_path) as (engine, fakes):
        await engine.publish(policy.weights, 1)
        assert engine.published_bytes == 2 * sum(value.numel() for value in expected.values())
    for name, value in expected.items():
        assert value.dtype == torch.bfloat16 and fakes[1].weights[name].equal(value), name
    if kind == "full":
        assert gathered.total == engine.published_bytes, "ranks send no more to each other"


def has_weights(fake: Grouped, expected: dict[str, Tensor]) -> bool:
    sent = {name: value for name, value in fake.weights.items() if name in expected}
    return sent.keys() == expected.keys() and all(
        torch.allclose(value, expected[name], rtol=0, atol=1e-6) for name, value in sent.items()
    )

"""Two ranks publish to real servers, of which one is split over two processes: weights bucket by bucket, in every way,
or LoRA adapters alone. The servers agree with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import ANY

import anyio
import pytest
from anyio import to_thread

from tests.sglang.conftest import LORA_RANK, reset
from tests.sglang.policy import AGREE, EOS, PROMPT, WAYS, way_of
from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.rank_commands import LeaderChannel
from trainer.engine.base import Sampling
from trainer.engine.sglang.http_client import SGLangClient
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync import disk, process_group, tensors
from trainer.engine.sglang.weight_sync.adapters import plan_adapters
from trainer.engine.sglang.weight_sync.verify import TrainerReference
from trainer.model import load_model
from trainer.policy.settings import LoraSettings, UpdateSettings

BUCKET = 100_000
"""Bytes, so that there are several of a small model."""


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    with running_ranks(2, tmp_path_factory.mktemp("ranks")) as channel:
        yield channel


@pytest.mark.parametrize("way", WAYS)
async def test_servers_agree_with_ranks_that_publish_in_buckets(
    servers: tuple[ServerProcess, ServerProcess],
    channel: LeaderChannel,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    for module in (disk, process_group, tensors):
        monkeypatch.setattr(module, "BUCKET", BUCKET)
    update = UpdateSettings(lora=LoraSettings(rank=LORA_RANK)) if way == "tensors" else UpdateSettings()
    policy, _ = await to_thread.run_sync(make_updater, channel, model, AlgorithmSettings(), update)
    reference = TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors)
    urls = [server.url for server in servers]
    with anyio.fail_after(300):
        async with SGLangEngine(urls, way_of(way, model), reference=reference) as engine:
            for version in range(2):
                await engine.publish(policy.weights, version)
                assert engine.agreement is not None and engine.agreement.max_difference <= AGREE
            turn = await engine.generate(PROMPT, Sampling(max_tokens=8, banned_ids=(EOS,)))
            exact = (await to_thread.run_sync(policy.compute_logprobs, (*PROMPT, *turn.ids)))[-len(turn.ids) :]
    assert max(abs(own - other) for own, other in zip(turn.logprobs, exact, strict=True)) <= AGREE


async def test_split_server_agrees_with_ranks_that_publish_adapters_alone(
    second: ServerProcess, channel: LeaderChannel, model: Path
) -> None:
    await reset(second)
    update = UpdateSettings(lora=LoraSettings(rank=LORA_RANK), lr=0.01)
    policy, updater = await to_thread.run_sync(make_updater, channel, model, AlgorithmSettings(), update, False)
    plan = plan_adapters("auto", policy.adapter_shape, model, lends_memory=False)
    reference = TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, adapters=plan)
    turns = []
    with anyio.fail_after(300):
        async with SGLangEngine([second.url], way_of("tensors", model), reference=reference) as engine:
            assert engine.replicas[0].features.ranks == 2 and engine.capabilities.takes_adapters
            for version in range(3):
                batch = await to_thread.run_sync(random_batch, load_model(model), version)
                await to_thread.run_sync(updater.train_step, batch)
                await engine.publish(policy.weights, version)
                assert engine.agreement is not None and engine.agreement.max_difference <= AGREE
                turns.append(await engine.generate(PROMPT, Sampling(max_tokens=8, banned_ids=(EOS,))))
            assert (await engine.replicas[0].client.get("/v1/models"))["data"][1:] == [ANY]
            exact = (await to_thread.run_sync(policy.compute_logprobs, (*PROMPT, *turns[-1].ids)))[-8:]
            assert engine.published_bytes * 5 < sum(value.nbytes for value in policy.weights.values())
        async with SGLangClient(second.url) as client:
            assert len((await client.get("/v1/models"))["data"]) == 1
    assert [turn.versions for turn in turns] == [(version,) * 8 for version in range(3)]
    assert max(abs(own - other) for own, other in zip(turns[-1].logprobs, exact, strict=True)) <= AGREE

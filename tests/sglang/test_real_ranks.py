"""Two ranks publish their weights to real servers, bucket by bucket, in every way, and the servers agree with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from tests.sglang.policy import AGREE, EOS, PROMPT, WAYS, way_of
from tests.trainer.distributed.rank_pools import make_updater, running_ranks
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.rank_commands import LeaderChannel
from trainer.engine.base import Sampling
from trainer.engine.sglang.server_process import ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync import disk, process_group, tensors
from trainer.engine.sglang.weight_sync.verify import TrainerReference
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
    update = UpdateSettings(lora=LoraSettings(rank=4)) if way == "tensors" else UpdateSettings()
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

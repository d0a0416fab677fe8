"""Publishing LoRA adapters alone: named by requests, one for each version, and merged where a server cannot do it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
import torch

from tests.trainer.engine_sglang.engine_harness import serving
from tests.trainer.engine_sglang.fake_sglang import IDS, NAME, Fake, reads, weights
from tests.waiting import wait_until
from trainer.engine.base import Adapters, AdapterShape, EngineError, Generation, PolicyWeights, Sampling
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.adapters import AdapterPlan
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.sglang.weight_sync.verify import TrainerReference

SHAPE = AdapterShape(rank=2, alpha=4.0, modules=("q_proj",))
LORA = {"enable_lora": True, "max_lora_rank": 2, "lora_target_modules": ["q_proj"]}
AUTO = AdapterPlan("auto", SHAPE)
Trained = dict[str, torch.Tensor]


class Adapted(PolicyWeights):
    """The weights of a server's folder, and adapters."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    def adapters(self) -> Adapters:
        return Adapters(SHAPE, {"delta": (self._trained[NAME] - weights(0)[NAME]) / 2})

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._trained[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)


def lora_fake(**more: Any) -> Fake:
    return Fake(info=LORA, **more)


@asynccontextmanager
async def adapted_engine(
    *fakes: Fake, trained: Trained, plan: AdapterPlan = AUTO, **more: bool
) -> AsyncIterator[SGLangEngine]:
    """`trained` is what the trainer computes with, and may be changed."""

    def compute(ids: Any, images: Any = ()) -> list[float]:
        return reads(trained)(ids, images)

    reference = TrainerReference(compute, adapters=plan)
    async with serving(*fakes) as urls, SGLangEngine(urls, TensorSync(), reference=reference, **more) as engine:
        with anyio.fail_after(60):
            yield engine


async def publish(engine: SGLangEngine, trained: Trained, version: int) -> None:
    trained[NAME] = weights(version)[NAME]
    await engine.publish(Adapted(trained), version)


async def generate(engine: SGLangEngine, key: str = "", **sampling: Any) -> Generation:
    return await engine.generate(IDS, Sampling(**{"max_tokens": 4, **sampling}), key=key)


async def test_requests_name_the_adapters_of_their_version_and_earlier_ones_are_unloaded() -> None:
    fake, trained = lora_fake(), weights(0)
    async with adapted_engine(fake, trained=trained) as engine:
        assert engine.capabilities.takes_adapters
        for version in (3, 4):
            await publish(engine, trained, version)
            assert engine.agreement is not None and engine.agreement.max_difference < 1e-5
            turn = await generate(engine)
            assert turn.versions == (version,) * 4
            assert list(fake.adapters) == [fake.bodies("/generate")[-1]["lora_path"]]
        assert engine.published_bytes == weights(0)[NAME].nbytes
    assert not fake.bodies("/update_weights_from_tensor") and not fake.bodies("/pause_generation")
    assert fake.adapters == {}, "a server that goes on has none of ours"


async def test_turn_under_way_ends_with_its_adapters_which_are_unloaded_later() -> None:
    fake, trained = lora_fake(hold_at=3), weights(0)
    async with adapted_engine(fake, trained=trained, publishes_mid_turn=True) as engine:
        turns: list[Generation] = []

        async def run() -> None:
            turns.append(await generate(engine, max_tokens=6))

        fake.released.set()
        await publish(engine, trained, 1)
        fake.released = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await wait_until(lambda: fake.held)
            fake.hold_at = 99
            await publish(engine, trained, 2)
            assert len(fake.adapters) == 2
            fake.released.set()
            await wait_until(lambda: turns)
        assert turns[0].versions == (1,) * 6
        assert (await generate(engine)).versions == (2,) * 4
        await publish(engine, trained, 3)
        assert [name.rpartition("-")[2] for name in fake.adapters] == ["3"]


async def test_restarted_server_gets_the_latest_adapters() -> None:
    fakes, trained = [lora_fake(), lora_fake()], weights(0)
    async with adapted_engine(*fakes, trained=trained) as engine:
        await publish(engine, trained, 1)
        fakes[1].start_anew()
        trained[NAME] = weights(7)[NAME]  # Trained since, and not published.
        async with anyio.create_task_group() as tasks:  # At the same time, so that some ask this server.
            for key in "abcd":
                tasks.start_soon(partial(generate, engine, key))
        await wait_until(lambda: fakes[1].adapters and engine.replicas[1].up)
        assert all(fake.adapters.keys() == fakes[0].adapters.keys() for fake in fakes)
        turn = await generate(engine, "e")
    assert turn.versions == (1,) * 4


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, "started without --enable-lora"),
        ({**LORA, "max_lora_rank": 1}, "--max-lora-rank 1, less than 2"),
        ({**LORA, "lora_target_modules": ["o_proj"]}, "that lack q_proj"),
    ],
)
async def test_server_that_takes_no_such_adapters_gets_merged_weights_or_is_refused(
    info: dict[str, Any], problem: str
) -> None:
    fake, trained = Fake(info=info), weights(0)
    async with adapted_engine(fake, trained=trained) as engine:
        await publish(engine, trained, 1)
        assert fake.weights[NAME].equal(trained[NAME]) and not engine.capabilities.takes_adapters
        assert any(problem in note for note in engine.capabilities.notes)
    async with serving(fake) as urls:
        reference = TrainerReference(adapters=AdapterPlan("adapters", SHAPE))
        with pytest.raises(EngineError, match=problem):
            await SGLangEngine(urls, TensorSync(), reference=reference).__aenter__()

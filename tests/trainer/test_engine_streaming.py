"""Engines that report ids as they are sampled: all of them, in order, and before the turn is over."""

from __future__ import annotations

import anyio
import pytest

from tests.trainer import tiny_models
from tests.trainer.torch_engines import engine
from trainer.engine.base import Sampling
from trainer.engine.torch.torch_engine import TorchEngine

__all__ = ["engine"]

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_embedded_engine_reports_ids_of_those_who_ask_while_all_generate(engine: TorchEngine) -> None:
    prompt, seen = tiny_models.random_prompt(30), list[int]()
    results = {}

    async def generate(seed: int) -> None:
        on_ids = seen.extend if seed == 1 else None
        results[seed] = await engine.generate(prompt, Sampling(max_tokens=40, seed=seed), on_ids=on_ids)

    async with anyio.create_task_group() as tasks:
        for seed in range(3):
            tasks.start_soon(generate, seed)
    assert tuple(seen) == results[1].ids and len(seen) == 40
    alone = await engine.generate(prompt, Sampling(max_tokens=40, seed=1))
    assert alone.ids == results[1].ids


async def test_cancelled_request_reports_nothing_more(engine: TorchEngine) -> None:
    seen = list[int]()
    with anyio.CancelScope() as scope:

        def report(ids: object) -> None:
            seen.append(1)
            scope.cancel()

        await engine.generate(tiny_models.random_prompt(30), Sampling(max_tokens=200), on_ids=report)
    assert scope.cancelled_caught
    count = len(seen)
    await engine.generate(tiny_models.random_prompt(30), Sampling(max_tokens=20))
    assert len(seen) == count

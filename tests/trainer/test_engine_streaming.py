"""Engines that report ids as they are sampled: all of them, in order, and before the turn is over."""

from __future__ import annotations

import anyio
import pytest

from tests.trainer import tiny_models
from tests.trainer.torch_engines import StepGate, engine
from trainer.engine.base import Sampling
from trainer.engine.scripted import ScriptedEngine
from trainer.engine.torch.torch_engine import TorchEngine

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["engine"]


async def test_scripted_engine_reports_its_answer_id_by_id() -> None:
    seen: list[tuple[int, ...]] = []
    scripted = ScriptedEngine(lambda ids, sampling, key: (5, 6, 7, 8))
    generation = await scripted.generate((1,), Sampling(max_tokens=3), on_ids=lambda ids: seen.append(tuple(ids)))
    assert seen == [(5,), (6,), (7,)] and generation.ids == (5, 6, 7)


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


async def test_embedded_engine_reports_ids_before_the_turn_is_over(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, seen, results = StepGate(monkeypatch, 10), list[int](), []

    async def generate() -> None:
        sampling = Sampling(max_tokens=200, temperature=0)
        results.append(await engine.generate(tiny_models.random_prompt(30), sampling, on_ids=report))

    def report(ids: object) -> None:
        seen.append(len(results))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await gate.reached.wait()
        gate.open()
    assert len(seen) > 1 and set(seen) == {0}


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

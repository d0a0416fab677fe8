"""Continuous batching: publish, cancellation, streaming and failures while sequences are generated."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import anyio
import pytest
import torch

from tests.trainer import tiny_models
from tests.trainer.torch_engines import LONG, SHORT, StepGate, engine
from trainer.engine.base import EngineError, Sampling
from trainer.engine.torch import continuous_batch
from trainer.engine.torch.torch_engine import TorchEngine

__all__ = ["engine"]

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_logprobs_are_exact_before_and_after_a_publish_during_a_generation(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, prompt, results = StepGate(monkeypatch, 10), tiny_models.random_prompt(30), []
    old, new = tiny_models.load_model(), tiny_models.load_model(seed=1)

    async def generate() -> None:
        results.append(await engine.generate(prompt, Sampling(max_tokens=20, temperature=0)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await gate.reached.wait()
        tasks.start_soon(engine.publish, new.state_dict(), 1)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    (generation,) = results
    first_count = generation.versions.count(0)
    assert first_count in {10, 11} and generation.versions == (0,) * first_count + (engine.version,) * (
        20 - first_count
    )
    assert generation.ids[:first_count] == tiny_models.generate_greedy(old, prompt, first_count)
    assert generation.ids[first_count:] == tiny_models.generate_greedy(
        new, [*prompt, *generation.ids[:first_count]], 20 - first_count
    )
    expected = (
        tiny_models.compute_logprobs(old, prompt, generation.ids, 1.0)[:first_count]
        + tiny_models.compute_logprobs(new, prompt, generation.ids, 1.0)[first_count:]
    )
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
async def test_publish_clears_the_prefix_cache(family: str) -> None:
    prompt, new = tiny_models.random_prompt(40), tiny_models.load_model(family, seed=1)
    async with TorchEngine(tiny_models.load_model(family)) as engine:
        await engine.generate(prompt, SHORT)
        await engine.publish(new.state_dict(), 5)
        generation = await engine.generate(prompt, SHORT)
        assert (generation.cached_tokens, generation.version) == (0, 5)
        assert generation.ids == tiny_models.generate_greedy(new, prompt, 6)
        assert (await engine.generate(prompt, SHORT)).cached_tokens == 39


async def test_weights_of_another_model_are_rejected_unchanged() -> None:
    model, prompt = tiny_models.load_model(), tiny_models.random_prompt(10)
    good_state = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    async with TorchEngine(model) as engine:
        for bad_state, reason in (
            ({key: value for key, value in good_state.items() if key != name}, f"1 missing, as '{name}'"),
            ({**good_state, "adapter": torch.zeros(1)}, "1 unknown, as 'adapter'"),
            ({**good_state, name: torch.zeros(3, 3)}, "shape"),
        ):
            with pytest.raises(EngineError, match=reason):
                await engine.publish(bad_state, 1)
        assert (await engine.generate(prompt, SHORT)).ids == tiny_models.generate_greedy(model, prompt, 6)
        assert engine.version == 0


async def test_cancelled_request_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(60):
        async with TorchEngine(tiny_models.load_model(), max_sequences=1) as engine:
            gate = StepGate(monkeypatch, 5)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.generate, tiny_models.random_prompt(10), LONG)
                await gate.reached.wait()
                tasks.cancel_scope.cancel()
            gate.open()
            generation = await engine.generate(tiny_models.random_prompt(20), SHORT)
            assert generation.ids == tiny_models.generate_greedy(
                tiny_models.load_model(), tiny_models.random_prompt(20), 6
            )
            assert set(gate.sequence_counts) == {1}
            assert len(gate.sequence_counts) < 20


async def test_late_sibling_waits_for_a_prompt_that_is_being_prefilled(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous_batch, "MAX_STEP_TOKENS", 32)
    gate, prompt, results = StepGate(monkeypatch, 1), tiny_models.random_prompt(120), []

    async def generate() -> None:
        results.append(await engine.generate(prompt, SHORT))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await gate.reached.wait()
        for _ in range(3):
            tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert sorted(generation.cached_tokens for generation in results) == [0, *[len(prompt) - 1] * 3]


async def test_leaving_the_engine_ends_generations_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[str] = []

    async def generate(engine: TorchEngine) -> None:
        try:
            await engine.generate(tiny_models.random_prompt(10), LONG)
        except EngineError as error:
            results.append(str(error))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, TorchEngine(tiny_models.load_model()) as engine:
            gate = StepGate(monkeypatch, 5)
            tasks.start_soon(generate, engine)
            await gate.reached.wait()
            gate.open()
    assert results == ["the engine was closed"]
    with pytest.raises(EngineError, match="not open"):
        await engine.generate(tiny_models.random_prompt(10), SHORT)


async def test_engine_leaves_no_thread_or_reference_behind() -> None:
    threads = threading.active_count()
    async with TorchEngine(tiny_models.load_model()) as engine:
        await engine.generate(tiny_models.random_prompt(10), SHORT)
        engine_reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert engine_reference() is None
    assert threading.active_count() <= threads + 1  # The event loop's pool keeps its idle worker.


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


def raises(error: Exception) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("a kernel broke"), "RuntimeError: a kernel broke"),
        (torch.OutOfMemoryError("20 GiB"), "lower `concurrency.running_requests` or `limits.rollout_tokens`"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "lower `concurrency.running_requests` or `limits.rollout_tokens`",
        ),
    ],
)
async def test_failing_step_ends_its_sequences_but_not_the_engine(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("trainer.engine.torch.paged_attention.AttentionPlan.attend", raises(error))
        with pytest.raises(EngineError, match=reason):
            await engine.generate(tiny_models.random_prompt(10), SHORT)
    assert (await engine.generate(tiny_models.random_prompt(10), SHORT)).ids == tiny_models.generate_greedy(
        tiny_models.load_model(), tiny_models.random_prompt(10), 6
    )


@pytest.mark.parametrize(
    "function",
    [
        "kv_cache.KVCache.ensure_length",
        "kv_cache.KVCache.read",
        "kv_cache.PrefixCache.insert",
        "continuous_batch.sample",
    ],
)
async def test_every_sequence_fails_when_memory_runs_out_at_any_place(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    errors = []

    async def generate(seed: int) -> None:
        try:
            await engine.generate(tiny_models.random_prompt(10, seed=seed), SHORT)
        except EngineError as error:
            errors.append(str(error))

    with monkeypatch.context() as broken:
        broken.setattr(f"trainer.engine.torch.{function}", raises(MemoryError()))
        async with anyio.create_task_group() as tasks:
            for seed in (1, 2, 2):
                tasks.start_soon(generate, seed)
    assert ["out of memory" in error for error in errors] == [True] * 3
    assert (await engine.generate(tiny_models.random_prompt(10), SHORT)).ids == tiny_models.generate_greedy(
        tiny_models.load_model(), tiny_models.random_prompt(10), 6
    )


async def test_non_finite_weights_are_reported(engine: TorchEngine) -> None:
    good_state = tiny_models.load_model().state_dict()
    await engine.publish({name: tensor * torch.nan for name, tensor in good_state.items()}, 3)
    with pytest.raises(EngineError, match="not finite under version 3"):
        await engine.generate(tiny_models.random_prompt(10), SHORT)
    await engine.publish(good_state, 4)
    assert (await engine.generate(tiny_models.random_prompt(10), SHORT)).ids == tiny_models.generate_greedy(
        tiny_models.load_model(), tiny_models.random_prompt(10), 6
    )

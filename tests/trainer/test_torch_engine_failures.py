"""Failures of the torch engine: exceptions, memory and weights that are not finite, while sequences are generated."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import torch

from tests.trainer import tiny_models
from tests.trainer.torch_engines import SHORT, engine
from trainer.engine.base import EngineError
from trainer.engine.torch.torch_engine import TorchEngine

__all__ = ["engine"]

pytestmark = pytest.mark.usefixtures("one_thread")


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

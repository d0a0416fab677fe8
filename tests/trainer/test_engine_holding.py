"""How the embedded engine holds weights: shared with the trainer where they take turns, copied, or in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.trainer import tiny_models
from trainer.engine.base import Generation, Sampling
from trainer.engine.torch import choose_holding
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.engine.torch.weights import Holding
from trainer.engines import make_engine
from trainer.policy.policy import Policy
from trainer.policy.settings import LoraSettings, UpdateSettings
from trainer.rollout.settings import BaseRolloutSettings, TemplateSettings
from trainer.setup import load_template

SAMPLING = Sampling(max_tokens=24, seed=3)
PROMPT = list(range(2, 40))
FAMILIES = ["qwen2", "qwen3", "llama", "biased"]


class ModeSettings(BaseRolloutSettings):
    mode: str = "synchronous"


@pytest.fixture
def every_size_shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choose_holding, "MIN_SHARED", 0)
    yield


def make_for(model: Path, mode: str, **update: Any) -> tuple[Any, Policy]:
    policy = Policy.load(model, UpdateSettings(**update))
    template = load_template(model, TemplateSettings())
    settings = ModeSettings(mode=mode, engine="torch")
    return make_engine(settings, model, template, Path("logs"), policy=policy), policy


def shared_pointers(engine: Any, policy: Policy) -> set[str]:
    """The trainer's matrices whose memory the engine uses."""
    weights = engine._model._weights
    held = {matrix.data_ptr() for name in weights._fused for matrix in weights.matrices(name)}
    return {name for name, value in policy.model.named_parameters() if value.ndim == 2 and value.data_ptr() in held}


def test_synchronous_run_has_one_copy_of_the_weights(model: Path, every_size_shares: None, one_thread: None) -> None:
    engine, policy = make_for(model, "synchronous")
    matrices = {name for name, value in policy.model.named_parameters() if value.ndim == 2}
    assert shared_pointers(engine, policy) == matrices and matrices


@pytest.mark.parametrize(
    ("mode", "update"),
    [("one_step_off", {}), ("asynchronous", {}), ("synchronous", {"lora": LoraSettings(rank=1)})],
)
def test_engine_keeps_its_copy_where_weights_differ_or_change_during_rollouts(
    model: Path, mode: str, update: dict[str, Any], every_size_shares: None, one_thread: None
) -> None:
    engine, policy = make_for(model, mode, **update)
    assert not shared_pointers(engine, policy)


async def generate(model: Any, holding: Holding) -> Generation:
    async with TorchEngine(model, holding=holding) as engine:
        return await engine.generate(PROMPT, SAMPLING)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_weights_generate_what_copied_ones_do(family: str, one_thread: None) -> None:
    model = tiny_models.load_model(family)
    copied, shared = anyio.run(generate, model, "copied"), anyio.run(generate, model, "shared")
    assert copied.ids == shared.ids
    assert shared.logprobs == pytest.approx(copied.logprobs, abs=1e-5)


def test_engine_that_shares_weights_makes_no_step_from_release_until_publish(one_thread: None) -> None:
    after: list[Generation] = []

    async def play() -> None:
        model = tiny_models.build_qwen2()
        async with TorchEngine(model, holding="shared") as engine, anyio.create_task_group() as tasks:
            first = await engine.generate(PROMPT, SAMPLING)
            assert await engine.release_memory() and engine._batch._kv_cache.length == 0

            async def continue_later() -> None:
                after.append(await engine.generate(PROMPT, SAMPLING))

            tasks.start_soon(continue_later)
            await anyio.wait_all_tasks_blocked()
            assert not after
            with torch.no_grad():
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
            await engine.publish(dict(model.state_dict()), 1)
            with anyio.fail_after(60):
                while not after:
                    await anyio.lowlevel.checkpoint()
            assert after[0].version == 1 and after[0].ids != first.ids

    anyio.run(play)
    model = tiny_models.build_qwen2()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert anyio.run(generate, model, "copied").ids == after[0].ids

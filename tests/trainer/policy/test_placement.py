"""Tests how trainer and engine share a GPU: side by side if both fit, otherwise taking turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from trainer.policy.memory_parts import GIB, MemoryPlan
from trainer.policy.memory_plan import plan_memory
from trainer.policy.placement import MAX_FRACTION, Placement, plan_placement, server_reserve, shares_gpu_with_server
from trainer.rollout.settings import ServingSettings
from trainer.train.settings import TrainSettings

LARGE = 100 * GIB
RESERVE = server_reserve((), 40 * GIB)
"""What a server keeps free on a GPU of 35 to 60 GiB; it is nearly the same on one of 20 to 35."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model with half a billion weights, without the weights."""
    folder = tmp_path_factory.mktemp("placement")
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936).save_pretrained(folder)
    return folder


def make_settings(**more: Any) -> TrainSettings:
    defaults = {
        "engine": "sglang",
        "model": "m",
        "data": "d",
        "reward": {"components": {"right": {"function": "outcome"}}},
    }
    return TrainSettings.model_validate(
        defaults | {"limits": {"rollout_tokens": 256}, "update": {"micro_batch_tokens": 4096}} | more
    )


def make_placement(folder: Path, available: int, **more: Any) -> Placement:
    return plan_placement(make_settings(**more), folder, available, shares_gpu=True)


def needed_bytes(folder: Path) -> tuple[int, int]:
    """The bytes that the engine needs, with its overhead, and those of the trainer."""
    parts = plan_memory(make_settings(), folder, LARGE).parts
    return sum(part.size for part in parts[:2]) + RESERVE, MemoryPlan(parts[2:], LARGE).needed


def test_both_are_side_by_side_if_they_fit(folder: Path) -> None:
    engine, trainer = needed_bytes(folder)
    available = engine + trainer + 2 * GIB
    placement = make_placement(folder, available)
    weights = plan_memory(make_settings(), folder, LARGE).parts[2].size
    assert placement.kind == "beside" and placement.fraction is not None
    left = (1 - placement.fraction) * (
        available - weights
    )  # What a server leaves of the memory that is free at its start.
    assert left == pytest.approx(trainer - weights + RESERVE)
    assert placement.fraction * (available - weights) >= engine - RESERVE
    assert placement.apply_to(ServingSettings()).options == ("--mem-fraction-static", f"{placement.fraction:.3f}")
    assert "placement: side by side; the server may take" in str(placement)
    assert make_placement(folder, LARGE * 100).fraction == MAX_FRACTION


def test_they_take_turns_if_they_do_not_fit_and_the_run_is_synchronous(folder: Path) -> None:
    engine, trainer = needed_bytes(folder)
    available = max(engine, trainer + RESERVE) + GIB
    assert available < engine + trainer
    placement = make_placement(folder, available)
    serving = placement.apply_to(ServingSettings(options=("--dtype", "float32")))
    assert (
        placement.kind == "together"
        and placement.plan.fits
        and "releases its memory during each update" in str(placement)
    )
    assert serving.placement == "together"
    assert serving.options[:2] == ("--dtype", "float32") and serving.options[-1] == "--enable-memory-saver"
    asynchronous = make_placement(folder, available, mode="asynchronous")
    assert asynchronous.kind == "beside" and not asynchronous.plan.fits


def test_server_has_its_weights_again_while_a_bucket_of_new_ones_is_on_its_way(folder: Path) -> None:
    weights, _, *training = plan_memory(make_settings(), folder, LARGE).parts
    kept = sum(part.size for part in training if not part.is_transient)
    plan = make_placement(folder, LARGE, serving={"placement": "together"}).plan
    assert plan.needed_during("publishing") == server_reserve((), LARGE) + weights.size + kept + GIB


@pytest.mark.parametrize(
    ("serving", "ranks", "shares"),
    [
        ({}, 1, True),
        ({"replicas": 4}, 4, False),
        ({"options": ["--base-gpu-id", "7"]}, 7, False),
        ({"options": ["--base-gpu-id", "6"]}, 7, True),
        ({"replicas": 2, "options": ["--base-gpu-id", "0"]}, 1, True),
    ],
)
def test_first_gpu_of_the_servers_decides_whether_they_share_one(
    serving: dict[str, Any], ranks: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert shares_gpu_with_server(make_settings(serving=serving), ranks) == shares


def test_taking_turns_in_an_asynchronous_mode_is_rejected() -> None:
    with pytest.raises(ValueError, match="works in synchronous mode only"):
        make_settings(mode="one_step_off", serving={"placement": "together"})


@pytest.mark.parametrize(
    ("memory", "options", "expected"),
    [
        (79, (), 512 + 1.5 * 8192 + 2 * 256),
        (140, (), 512 + 1.5 * 8192 + 2 * 256),
        (79, ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs=8"), 10 * 1024),
        (24, ("--cuda-graph-max-bs", "16"), 512 + 1.5 * 4096 + 2 * 16),
        (16, (), 512 + 1.5 * 2048 + 2 * 8),
    ],
)
def test_server_keeps_as_much_free_as_sglang_would_by_itself(
    memory: int, options: tuple[str, ...], expected: float
) -> None:
    assert server_reserve(options, memory * GIB) == expected * 2**20

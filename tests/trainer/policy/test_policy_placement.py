"""Who has how much of one GPU is told before the start: side by side where both fit, else by turns, else not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from trainer.config import ServingSettings
from trainer.policy.errors import PolicyError
from trainer.policy.memory import GIB, plan
from trainer.policy.placement import MOST, OWN, Placement, placement
from trainer.train.settings import TrainSettings

LARGE = 100 * GIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes of half a milliard of weights, and none of them."""
    folder = tmp_path_factory.mktemp("placed")
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936).save_pretrained(folder)
    return folder


def settings(**more: Any) -> TrainSettings:
    given = {
        "engine": "sglang",
        "model": "m",
        "data": "d",
        "reward": {"components": {"right": {"function": "outcome"}}},
    }
    return TrainSettings.model_validate(given | {"limits": {"rollout_tokens": 256}, "update": {"tokens": 4096}} | more)


def placed(folder: Path, room: int, **more: Any) -> Placement:
    return placement(settings(**more), folder, room, served=True)


def needs(folder: Path) -> tuple[int, int]:
    """Of the engine with what is its own, and of the trainer."""
    parts = plan(settings(), folder, LARGE).parts
    return sum(part.size for part in parts[:2]) + OWN, sum(part.size for part in parts[2:])


def test_where_both_fit_they_are_side_by_side_and_the_server_leaves_the_trainer_its_room(folder: Path) -> None:
    engine, trainer = needs(folder)
    room = engine + trainer + GIB
    found = placed(folder, room)
    weights = plan(settings(), folder, LARGE).parts[2].size
    assert found.kind == "beside" and found.fraction is not None
    left = (1 - found.fraction) * (room - weights)  # What a server leaves free of what is free when it starts.
    assert left == pytest.approx(trainer - weights + OWN)
    assert found.fraction * (room - weights) >= engine - OWN
    assert found.serving(ServingSettings()).options == ("--mem-fraction-static", f"{found.fraction:.3f}")
    assert "placement: side by side; the server may take" in str(found)
    assert placed(folder, LARGE * 100).fraction == MOST


def test_where_they_do_not_they_take_turns_unless_rollouts_run_ahead(folder: Path) -> None:
    engine, trainer = needs(folder)
    room = max(engine, trainer) + 3 * GIB
    assert room < engine + trainer
    found = placed(folder, room)
    chosen = found.serving(ServingSettings(options=("--dtype", "float32")))
    assert found.kind == "together" and found.plan.fits and "lends its memory to each update" in str(found)
    assert chosen.placement == "together"
    assert chosen.options[:2] == ("--dtype", "float32") and chosen.options[-1] == "--enable-memory-saver"
    ahead = placed(folder, room, mode="asynchronous")
    assert ahead.kind == "beside" and not ahead.plan.fits
    with pytest.raises(PolicyError, match="does not fit"):
        ahead.plan.require()


def test_what_the_operator_asks_for_is_done(folder: Path) -> None:
    asked = placed(folder, LARGE, serving={"placement": "together", "options": ["--mem-fraction-static", "0.5"]})
    assert asked.kind == "together"
    serving = asked.serving(settings(serving={"options": ["--mem-fraction-static", "0.5"]}).serving)
    assert serving.options == ("--mem-fraction-static", "0.5", "--enable-memory-saver")


def test_without_a_gpu_nothing_is_lent_and_it_is_said(folder: Path) -> None:
    found = placement(settings(), folder, LARGE, served=False)
    assert found.fraction is None and found.serving(ServingSettings()) == ServingSettings()
    assert "no server of ours shares a GPU with the trainer, nothing is lent" in str(found)
    assert found.plan.needed == plan(settings(), folder, LARGE).needed


def test_taking_turns_while_rollouts_run_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="needs times in which nothing is written"):
        settings(mode="one_step_off", serving={"placement": "together"})

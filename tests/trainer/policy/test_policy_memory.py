"""What a run will need is told before it starts, near enough to the truth, with what makes it less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.made import model, packed
from trainer.config import RolloutSettings
from trainer.learn.settings import AlgorithmSettings, KLSettings
from trainer.policy.errors import PolicyError
from trainer.policy.memory import Plan, free, moving, plan
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, LoraSettings, UpdateSettings

GIB = 1024**3


class Learning(RolloutSettings):
    update: UpdateSettings = UpdateSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path)
    return tmp_path


def planned(folder: Path, room: int = GIB, kl: float = 0.0, **update: Any) -> Plan:
    algorithm = AlgorithmSettings(kl=KLSettings(coefficient=kl))
    settings = Learning(model=folder, data="-", out=folder, update=UpdateSettings(**update), algorithm=algorithm)
    return plan(settings, folder, room)


def size(found: Plan, what: str) -> int:
    return sum(part.size for part in found.parts if part.what.startswith(what))


def test_weights_and_all_that_goes_with_them_are_counted(folder: Path) -> None:
    whole = 4 * sum(value.numel() for value in model().parameters())
    found = planned(folder, kl=0.1, critic=CriticSettings())
    for what, times in {"weights of": 1, "gradients": 1, "optimizer": 2, "reference": 1, "critic": 4}.items():
        assert size(found, what) == times * whole, what
    assert size(planned(folder, optimizer="muon"), "optimizer") < 2 * whole
    light = planned(folder, kl=0.1, lora=LoraSettings(rank=1))
    assert size(light, "gradients") == size(light, "reference") == 0 and 0 < size(light, "adapters") < 4 * whole
    # Two layers of keys and values, two heads of eight, for each of 64 rows of 4096 tokens.
    assert size(found, "keys and values") == 64 * 4096 * 2 * 2 * 16 * 4


def test_rollouts_alone_need_no_more_than_the_engine(folder: Path) -> None:
    found = plan(RolloutSettings(model=folder, data="-", out=folder), folder, GIB)
    assert [part.what for part in found.parts] == ["weights of the engine", "keys and values"]
    assert found.fits and found.remedy == ""


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_pass_keeps_is_told_near_enough(checkpointing: bool) -> None:
    update = UpdateSettings(checkpointing=checkpointing)
    policy = Policy(model(), update)
    kept: dict[int, int] = {}
    weights = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}

    def pack(value: Tensor) -> Tensor:
        store = value.untyped_storage()
        if store.data_ptr() not in weights:
            kept[store.data_ptr()] = store.nbytes()
        return value

    ids_T, sequence_T, _ = packed([[(7 * place + row) % 50 for place in range(40)] for row in range(20)])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden = policy.reader.hidden(ids_T, sequence_T)
    told = moving(policy.model, update, len(ids_T))[0].size
    assert hidden.values_UD.requires_grad
    # What is computed a second time is there only on the way back.
    least = 2 * 4 * 16 * len(ids_T) if checkpointing else 0.7 * told
    assert least <= sum(kept.values()) < 1.3 * told


@pytest.mark.parametrize(
    ("update", "first"),
    [
        ({"tokens": 10**9}, "lower `update.tokens` or set `update.checkpointing`"),
        ({"tokens": 10**9, "checkpointing": True}, "lower `update.tokens`;"),
        ({"chunk": 10**9}, "lower `update.chunk`"),
        ({}, "lower `admission.writing` or `limits.rollout_tokens`"),
    ],
)
def test_what_does_not_fit_names_what_makes_it_smaller(folder: Path, update: dict[str, Any], first: str) -> None:
    found = planned(folder, room=1000, **update)
    assert not found.fits and found.remedy.startswith(first)
    with pytest.raises(PolicyError, match=r"does not fit: memory: .*GiB that are free\n  remedy: lower"):
        found.require()


def test_a_large_model_is_told_of_adapters(folder: Path) -> None:
    found = planned(folder, room=1000, tokens=1, chunk=1)
    wide = Plan(tuple(part for part in found.parts if part.what in ("weights", "gradients", "optimizer")), 1000)
    assert "set `update.lora` (optimizer" in wide.remedy and "take a smaller model (weights" in wide.remedy


def test_what_fits_is_not_complained_of(folder: Path) -> None:
    found = planned(folder, room=100 * GIB)
    found.require()
    assert found.fits and "GiB that are free" in str(found)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="holds no causal language model"):
        planned(tmp_path)


def test_there_is_some_room_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free() > 2**20
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "nothing of the kind")
    assert free() > 2**20

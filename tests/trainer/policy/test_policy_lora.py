"""Adapters move alone, are saved alone, and reach the engine as if there were none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.trainer.policy.made import alone, lesson, logprobs, model
from trainer.learn.settings import AlgorithmSettings, KLSettings
from trainer.model import load_model
from trainer.policy.errors import PolicyError
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.policy.settings import LoraSettings, UpdateSettings

UPDATE = UpdateSettings(lr=3e-2, lora=LoraSettings(rank=4, alpha=8))
KL = AlgorithmSettings(kl=KLSettings(coefficient=0.01))
ROWS = [[1, 2, 3, 4], [1, 2, 5]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def learned(policy: Policy, steps: int) -> Policy:
    learner = Learner(policy, KL, exact=True)
    for _ in range(steps):
        learner.learn(lesson(model()))
    return policy


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_adapters_move(folder: Path, checkpointing: bool) -> None:
    policy = Policy.load(folder, UPDATE.model_copy(update={"checkpointing": checkpointing}), "cpu")
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    learned(policy, 2)
    moved = {name for name, value in policy.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name} and len(moved) == 28


def test_weights_for_the_engine_are_merged_and_named_as_without_adapters(folder: Path) -> None:
    policy = learned(Policy.load(folder, UPDATE, "cpu"), 2)
    plain = load_model(folder)
    assert {name: value.shape for name, value in policy.weights.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    plain.load_state_dict(policy.weights)
    assert torch.allclose(logprobs(policy, ROWS), torch.cat([alone(plain, ids) for ids in ROWS]), atol=1e-5)


# A package's own call of something deprecated, which tells nothing of ours.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_what_is_saved_is_adapters_alone_which_peft_and_transformers_load(folder: Path, tmp_path: Path) -> None:
    policy = learned(Policy.load(folder, UPDATE, "cpu"), 2)
    policy.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    expected = logprobs(policy, ROWS)
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32),
        PeftModel.from_pretrained(load_model(folder), tmp_path / "saved"),
    ):
        assert torch.allclose(torch.cat([alone(loaded, ids) for ids in ROWS]), expected, atol=1e-5)


def test_going_on_from_saved_adapters_gives_the_same_weights_to_the_bit(folder: Path, tmp_path: Path) -> None:
    through = learned(Policy.load(folder, UPDATE, "cpu"), 4)
    learned(Policy.load(folder, UPDATE, "cpu"), 2).save(tmp_path / "saved")
    again = Policy.load(folder, UPDATE, "cpu")
    again.resume(tmp_path / "saved")
    learned(again, 2)
    assert all(torch.equal(value, again.weights[name]) for name, value in through.weights.items())


def test_the_reference_is_the_policy_without_adapters(folder: Path) -> None:
    policy = learned(Policy.load(folder, UPDATE, "cpu"), 2)
    moved = logprobs(policy, ROWS)
    bare = policy.reference().read(
        torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    )
    assert torch.allclose(bare.logprobs_T, alone(model(), ROWS[0]), atol=1e-5)
    assert torch.equal(moved, logprobs(policy, ROWS)) and not torch.allclose(moved[:4], bare.logprobs_T)


def test_adapters_of_another_rank_are_refused(folder: Path, tmp_path: Path) -> None:
    Policy.load(folder, UPDATE, "cpu").save(tmp_path / "saved")
    other = Policy.load(folder, UpdateSettings(lora=LoraSettings(rank=2, targets=("q_proj",))), "cpu")
    with pytest.raises(PolicyError, match=r"adapter_model\.safetensors cannot be taken up .*28 matrices, where 4"):
        other.resume(tmp_path / "saved")


def test_targets_that_are_not_there_and_a_package_that_is_not_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"`update.lora.targets`: .*nowhere"):
        Policy(model(), UpdateSettings(lora=LoraSettings(targets=("nowhere",))))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PolicyError, match=r"remedy: pip install -e '\.\[lora\]'"):
        Policy(model(), UPDATE)

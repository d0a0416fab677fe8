"""Tests LoRA: only adapters are trained and saved, and the engine gets merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.distributed.expert_models import KINDS, save_expert_model
from tests.trainer.policy.tiny_policies import (
    example_batch,
    pack_sequences,
    plain_logprobs,
    policy_logprobs,
    tiny_model,
)
from trainer.algorithms.settings import AlgorithmSettings, KLSettings
from trainer.model import load_model
from trainer.policy.memory_parts import find_adapted_layers
from trainer.policy.policy import Policy
from trainer.policy.settings import Checkpointing, LoraSettings, PolicyError, UpdateSettings
from trainer.policy.update import PolicyUpdater

UPDATE = UpdateSettings(lr=3e-2, lora=LoraSettings(rank=4, alpha=8))
KL = AlgorithmSettings(kl=KLSettings(coefficient=0.01))
ROWS = [[1, 2, 3, 4], [1, 2, 5]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def train_steps(policy: Policy, steps: int) -> Policy:
    updater = PolicyUpdater(policy, KL, exact=True)
    for _ in range(steps):
        updater.train_step(example_batch(tiny_model()))
    return policy


@pytest.mark.parametrize("checkpointing", [False, "feed_forward", True])
def test_only_adapters_change(folder: Path, checkpointing: Checkpointing) -> None:
    policy = Policy.load(folder, UPDATE.model_copy(update={"gradient_checkpointing": checkpointing}), "cpu")
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    train_steps(policy, 2)
    changed = {name for name, value in policy.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name} and len(changed) == 28


def test_engine_weights_are_merged_under_the_original_names(folder: Path) -> None:
    policy = train_steps(Policy.load(folder, UPDATE, "cpu"), 2)
    plain = load_model(folder)
    assert {name: value.shape for name, value in policy.weights.items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    plain.load_state_dict(policy.weights)
    assert torch.allclose(
        policy_logprobs(policy, ROWS), torch.cat([plain_logprobs(plain, ids) for ids in ROWS]), atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_attention_beside_experts_is_adapted_and_merged(kind: str, tmp_path: Path) -> None:
    plain = save_expert_model(tmp_path, kind)
    policy = train_steps(Policy.load(tmp_path, UPDATE, "cpu"), 2)
    assert {name.split(".")[3] for name, _ in policy.model.named_parameters() if "lora_" in name} == {"self_attn"}
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(value, policy.weights[name])}
    assert len(changed) == 8
    assert len(find_adapted_layers(plain, UPDATE)) == 8


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    save_expert_model(tmp_path, "mixtral")
    with pytest.raises(PolicyError, match="experts and their routers get no adapters") as caught:
        Policy.load(tmp_path, UpdateSettings(lora=LoraSettings(target_modules=("q_proj", "w1", "w3"))), "cpu")
    assert caught.value.remedy == "name layers of attention in `update.lora.target_modules`"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_adapters_get_identical_weights(folder: Path, tmp_path: Path, dtype: str) -> None:
    update = UPDATE.model_copy(update={"dtype": dtype})
    uninterrupted = train_steps(Policy.load(folder, update, "cpu"), 4)
    train_steps(Policy.load(folder, update, "cpu"), 2).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    resumed = Policy.load(folder, update, "cpu")
    resumed.resume(tmp_path / "saved")
    train_steps(resumed, 2)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in uninterrupted.weights.items())


def test_reference_is_the_policy_without_adapters(folder: Path) -> None:
    policy = train_steps(Policy.load(folder, UPDATE, "cpu"), 2)
    trained = policy_logprobs(policy, ROWS)
    reference = policy.load_reference().compute_batch_logprobs(pack_sequences([[1, 2, 3, 4]]))
    assert torch.allclose(reference.logprobs_T, plain_logprobs(tiny_model(), ROWS[0]), atol=1e-5)
    assert torch.equal(trained, policy_logprobs(policy, ROWS)) and not torch.allclose(trained[:4], reference.logprobs_T)

"""Servers read weights as files have them: what is published is what would have been saved, by the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.vision.seeing import KINDS, seeing_model
from trainer.engine.sglang.publish.way import distinct
from trainer.policy.policy import Policy
from trainer.policy.settings import LoraSettings, UpdateSettings

WORDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def published(policy: Policy, folder: Path) -> None:
    """It is what a checkpoint's file has: by name, by bits, and in no other order of its sides."""
    policy.model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    found = policy.filed(dict(distinct(policy.weights)))
    assert {*found} == {*saved}
    assert all(found[name].equal(saved[name]) for name in saved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["loaded", "moved"])
def test_a_model_that_sees(kind: str, before: str, tmp_path: Path) -> None:
    policy = Policy.load(seeing_model(tmp_path / "model", kind), UpdateSettings())
    if before == "moved":
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.add_(0.1)
    published(policy, tmp_path / "saved")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_reads(kind: str, tied: bool, tmp_path: Path) -> None:
    """Experts lie in one tensor in memory, and each by itself in a file."""
    words = WORDS | (EXPERTS if "moe" in kind else {})
    config = AutoConfig.for_model(kind, **words, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    published(Policy.load(tmp_path / "model", UpdateSettings()), tmp_path / "saved")


def test_adapters_are_merged_under_the_names_of_what_they_adapt(tmp_path: Path) -> None:
    folder = seeing_model(tmp_path / "model")
    policy = Policy.load(folder, UpdateSettings(lora=LoraSettings()))
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name and "q_proj" in name:
                weight.fill_(0.1)
    found, saved = policy.filed(dict(distinct(policy.weights))), load_file(folder / "model.safetensors")
    assert {*found} == {*saved}
    other = {name for name in saved if not found[name].allclose(saved[name])}
    assert other == {f"model.layers.{place}.self_attn.q_proj.weight" for place in range(2)}

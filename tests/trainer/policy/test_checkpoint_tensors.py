"""Tests that published weights have the names and shapes of a checkpoint's files, which servers expect."""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.policy.tiny_policies import SIZES
from tests.trainer.vision.vision_models import KINDS, seeing_model
from trainer.engine.sglang.weight_sync.base import untied_tensors
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.shards import IndexUnpickler

TEXT_CONFIG = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def assert_equals_saved(policy: Policy, folder: Path) -> None:
    """The published tensors equal those of a saved checkpoint, by name and value."""
    policy.model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    tensors = policy.checkpoint_tensors(dict(untied_tensors(policy.weights)))
    assert {*tensors} == {*saved}
    assert all(tensors[name].equal(saved[name]) for name in saved)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_vision_models(kind: str, tmp_path: Path) -> None:
    policy = Policy.load(seeing_model(tmp_path / "model", kind), UpdateSettings())
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.1)
    assert_equals_saved(policy, tmp_path / "saved")


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("llama", False), ("qwen3_moe", True)])
def test_tensors_of_text_models(kind: str, tied: bool, tmp_path: Path) -> None:
    """Experts are one tensor in memory, and separate tensors in a file."""
    sizes = TEXT_CONFIG | (EXPERTS if "moe" in kind else {})
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert_equals_saved(Policy.load(tmp_path / "model", UpdateSettings()), tmp_path / "saved")


class ByName:
    """A part of something, as `getattr` gives it: so Python before 3.11.4 pickles members of enumerations."""

    def __init__(self, of: object, name: str) -> None:
        self.parts = of, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.parts  # type: ignore[return-value]


def test_index_names_members_of_enumerations_alone() -> None:
    member = next(iter(_MEM_FORMAT_ENCODING))
    named = pickle.dumps(ByName(_MEM_FORMAT_ENCODING, member.name))
    assert IndexUnpickler(BytesIO(named)).load() is member
    for of, name in ((torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "__init__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            IndexUnpickler(BytesIO(pickle.dumps(ByName(of, name)))).load()

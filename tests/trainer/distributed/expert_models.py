"""Tiny mixture-of-experts models, whose files have each expert by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.trainer.policy.tiny_policies import SIZES

EXPERTS = 4
KINDS = ("mixtral", "qwen3_moe")


def save_expert_model(folder: Path, kind: str, **changes: Any) -> PreTrainedModel:
    """A model with fixed random weights, which is written to the folder."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, **changes}
    if kind == "mixtral":
        model: PreTrainedModel = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=EXPERTS))
    else:
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": sizes["intermediate_size"]}
        config = Qwen3MoeConfig(**sizes)
        model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert any(".experts.0." in name for name in file.keys())  # noqa: SIM118 - no mapping
    return model.train(False)

"""Tiny random models, with weights large enough that greedy choices are unambiguous."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 120
CONTEXT_LENGTH = 600
SHAPE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT_LENGTH // 4,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=1, rope_parameters=YARN)),
    "biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_key_value_heads=4, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5)
    ),
    "wide": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**SHAPE, "hidden_size": 448, "num_attention_heads": 7}, num_key_value_heads=1)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=24)),
}


@functools.cache
def load_model(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """A cached model; engines copy its weights."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model.train(False)


def build_qwen2(**changes: object) -> PreTrainedModel:
    """A Qwen2 with changes in its configuration."""
    torch.manual_seed(0)
    config = Qwen2Config(**{**SHAPE, "num_key_value_heads": 2, **changes})
    return Qwen2ForCausalLM(config).train(False)


@torch.no_grad()
def compute_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int], temperature: float
) -> list[float]:
    """The logprobs of sampled ids, computed as the trainer does: by one forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return [float(value) for value in logprobs]


@torch.no_grad()
def generate_greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The ids that transformers' `generate` chooses."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


def random_prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, VOCAB_SIZE, (length,), generator=generator)]

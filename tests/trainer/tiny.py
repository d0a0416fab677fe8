"""Tiny random models, spread out enough that greedy choices are clear."""

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

VOCABULARY = 120
CONTEXT = 600
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": CONTEXT // 4,
}
MAKE: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, rope_parameters=YARN)),
    "biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5)
    ),
    "wide": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**SIZES, "hidden_size": 448, "num_attention_heads": 7}, num_key_value_heads=1)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=24)),
}


@functools.cache
def model(family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """The same object for the same arguments: an engine copies what it takes."""
    torch.manual_seed(seed)
    made = MAKE[family]()
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return made.train(False)


def changed(**changes: object) -> PreTrainedModel:
    """A Qwen2 with something else in its configuration."""
    torch.manual_seed(0)
    config = Qwen2Config(**{**SIZES, "num_key_value_heads": 2, **changes})
    return Qwen2ForCausalLM(config).train(False)


@torch.no_grad()
def logprobs(model: PreTrainedModel, asked: Sequence[int], written: Sequence[int], temperature: float) -> list[float]:
    """Of what was written, as a trainer computes them: one forward over all of it."""
    ids = torch.tensor([[*asked, *written]])
    logits = model(ids).logits[0, len(asked) - 1 : -1].float() / temperature
    taken = logits.log_softmax(-1).gather(1, ids[0, len(asked) :, None])[:, 0]
    return [float(value) for value in taken]


@torch.no_grad()
def greedy(model: PreTrainedModel, asked: Sequence[int], count: int) -> tuple[int, ...]:
    """What `generate` writes."""
    ids = torch.tensor([list(asked)])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(asked) :].tolist())


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, VOCABULARY, (length,), generator=generator)]

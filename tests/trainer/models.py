"""A model's folder as `save_pretrained` writes it, small enough to be made for a test."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.tokenizers_for_tests import FAMILIES, folder_for


def tiny_model(folder: Path, family: str = "hermes", kind: str = "qwen3") -> Path:
    """Random weights: what it writes is noise, and how it is loaded, spoken to and sampled is as with any other."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from trainer.demo.facts.model import SHAPE

    folder.mkdir(parents=True, exist_ok=True)
    folder_for(FAMILIES[family], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        **SHAPE,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder

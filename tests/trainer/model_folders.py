"""Folders with tiny models, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.tokenizer_families import FAMILIES, save_tokenizer_folder


def save_tiny_model(folder: Path, family: str = "hermes", kind: str = "qwen3") -> Path:
    """Saves a tiny model with random weights and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from mtrl_plugins.demo.facts.facts_demo import MODEL_SHAPE

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer_folder(FAMILIES[family], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        **MODEL_SHAPE,
        vocab_size=len(tokenizer),
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder

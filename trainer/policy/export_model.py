"""Writes the model of a checkpoint as a Hugging Face folder: whole, with adapters merged, or the adapters alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from trainer.model import SHARDS_FOLDER, build_skeleton, load_model
from trainer.policy import lora
from trainer.policy.errors import PolicyError
from trainer.policy.policy import loading_checkpoint
from trainer.policy.shards import has_shards, load_model_tensors, saved_tensors

SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Settings that training does not change."""
GENERATION_FILE = "generation_config.json"


def has_adapters(checkpoint: Path) -> bool:
    """Whether only adapters were trained."""
    return (checkpoint / lora.ADAPTER_SETTINGS_FILE).is_file()


def write_model(checkpoint: Path, start: Path | None, out: Path) -> torch.dtype:
    """Writes the whole model into a folder; returns the dtype of its weights, which is that of the start.

    `start` is the model that training started from. Without adapters it may be missing: the dtype is then that of
    the checkpoint.
    """
    dtype, is_whole = _read_dtype(start or checkpoint), not has_adapters(checkpoint)
    if start is None and not is_whole:
        problem = f"the model that the adapters in {checkpoint} belong to is not where it was"
        raise PolicyError(problem, "name its folder with --model")
    with loading_checkpoint(checkpoint / SHARDS_FOLDER if has_shards(checkpoint) else checkpoint):
        if start is None or is_whole:
            _require_same_sizes(checkpoint, start)
            model = _load_whole(checkpoint, dtype)
        else:
            model = _load_merged(checkpoint, start, dtype)
    model.save_pretrained(out)
    if (checkpoint / GENERATION_FILE).is_file():
        shutil.copyfile(checkpoint / GENERATION_FILE, out / GENERATION_FILE)
    return dtype


def write_adapters(checkpoint: Path, start: Path | None, out: Path) -> torch.dtype:
    """Writes the adapters as peft reads them; returns their dtype."""
    settings = json.loads((checkpoint / lora.ADAPTER_SETTINGS_FILE).read_text(encoding="utf-8"))
    dtype = _read_dtype(start) if start else torch.float32
    with loading_checkpoint(checkpoint / SHARDS_FOLDER if has_shards(checkpoint) else checkpoint / lora.ADAPTER_FILE):
        adapters = lora.read_adapters(checkpoint)
    tensors = {f"{lora.NAME_PREFIX}{name}": value.to(dtype).contiguous() for name, value in adapters.items()}
    save_file(tensors, out / lora.ADAPTER_FILE, metadata={"format": "pt"})
    settings |= {"base_model_name_or_path": str(start)} if start else {}
    (out / lora.ADAPTER_SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return dtype


def _load_whole(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not has_shards(checkpoint):
        return load_model(checkpoint, dtype)
    model = build_skeleton(checkpoint, dtype)
    load_model_tensors(checkpoint, saved_tensors(model))
    return model


def _load_merged(checkpoint: Path, start: Path, dtype: torch.dtype) -> PreTrainedModel:
    trained = load_model(start)
    lora.attach_adapters(trained, checkpoint)
    merged: dict[str, Tensor] = {name: value.to(dtype) for name, value in lora.merge_adapters(trained).items()}
    del trained
    model = load_model(start, dtype)
    model.load_state_dict(merged)
    return model


def _require_same_sizes(checkpoint: Path, start: Path | None) -> None:
    """Raises ValueError if training cannot have started from this model."""
    configs = [AutoConfig.from_pretrained(folder, local_files_only=True) for folder in (checkpoint, start) if folder]
    texts = [config.get_text_config(decoder=True).to_dict() | {"model_type": config.model_type} for config in configs]
    for name in SIZES:
        values = [text.get(name) for text in texts]
        if values[0] != values[-1]:
            raise ValueError(f"it is of another model: {name} is {values[0]} there, not {values[-1]} as in {start}")


def _read_dtype(folder: Path) -> torch.dtype:
    """The dtype that a model's folder names."""
    if not (folder / "config.json").is_file():
        return torch.float32
    dtype = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32

"""A model is loaded in one place, from a folder, and never from a network."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging


def settle() -> None:
    """Of this process: loading shows no bars of its own, and products are made by one thread."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # More are slower for models that fit a machine without a GPU.


class ModelError(Exception):
    """The folder holds no model that can be loaded; the message says what to do."""


def load_model(
    path: str | Path, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The language model in a folder, for evaluation, with its eyes if it has any. Code that comes with it is never
    run."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json here; give the folder of a Hugging Face model")
    if isinstance(dtype, str):
        dtype = _dtype(dtype)
    try:
        model = kind_of(folder).from_pretrained(folder, dtype=dtype, local_files_only=True)
    except Exception as error:  # boundary: files of weights are read by several libraries, each with errors of its own
        raise ModelError(f"{folder}: cannot be loaded as a causal language model: {error}; copy it anew") from error
    return cast(PreTrainedModel, torch.nn.Module.to(model, device).train(False))


def kind_of(folder: Path) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Who loads the model in a folder."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"dtype {name!r} is none of torch's; use float32, bfloat16 or float16")
    return found

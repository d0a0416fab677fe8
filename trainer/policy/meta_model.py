"""A model without its weights, on torch's meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from trainer.model import auto_class
from trainer.policy.errors import PolicyError

TRIED = "Qwen2, Qwen3 and Llama are tried most"


def load_meta_model(folder: Path) -> Any:
    """The model of a folder; raises PolicyError if there is none."""
    if not folder.is_dir():
        problem = f"{folder} is a file, not a model's folder" if folder.is_file() else f"there is no folder {folder}"
        remedy = "name a model's folder; models are not downloaded: `hf download NAME --local-dir FOLDER` does that"
        raise PolicyError(problem, remedy)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return auto_class(folder).from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        if kind := _find_unknown_type(folder):
            release = f"transformers {transformers.__version__}"
            remedy = "upgrade it (`pip install -U transformers`), or name a model of a family that it knows: " + TRIED
            raise PolicyError(
                f"{folder} has a model of type {kind!r}, which {release} does not know", remedy
            ) from error
        raise PolicyError(f"{folder} has no causal language model: {error}", "name a model's folder") from error


def _find_unknown_type(folder: Path) -> str:
    """The `model_type` of a folder, if transformers has no model of that type; else empty."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):  # Told in the words of transformers.
        return ""
    return kind if isinstance(kind, str) and kind not in CONFIG_MAPPING else ""

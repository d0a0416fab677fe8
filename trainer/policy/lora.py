"""Adapters stand beside the model's own weights: saved alone, off for the reference, merged for the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from trainer.policy.errors import PolicyError
from trainer.policy.settings import LoraSettings

FILE = "adapter_model.safetensors"
ADAPTER = "default"
BEFORE = "base_model.model."
"""Stands before every name in a saved adapter."""


def adapt(model: PreTrainedModel, settings: LoraSettings, without: str = "") -> None:
    """From here on, the adapters alone are learned. They begin the same each time, and change nothing at first. A part
    of the model that is named gets none."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise PolicyError("`update.lora` needs the package peft", "pip install -e '.[lora]'") from error
    targets = list(settings.targets) or "all-linear"
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        exclude_modules=rf".*{re.escape(without.rpartition('.')[2])}\..*" if without else None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            model.add_adapter(config, ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"`update.lora.targets`: {error}", "name layers of this model, or none for all"
            ) from error


def load(model: PreTrainedModel, folder: Path) -> None:
    """What `save_pretrained` left of the adapters."""
    from peft.utils import set_peft_model_state_dict

    state = {name.removeprefix(BEFORE): value for name, value in load_file(folder / FILE).items()}
    own = sum("lora_" in name for name in model.state_dict())
    if len(state) != own:
        raise ValueError(f"it holds {len(state)} matrices, where {own} are learned")
    taken: Any = set_peft_model_state_dict(model, state, ADAPTER)
    if taken.unexpected_keys:
        raise ValueError(f"it holds {taken.unexpected_keys[0]}, which is not learned")


@contextmanager
def bare(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before there were adapters."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def merged(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """All weights by the names that they have without adapters."""
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    made = {}
    for name, value in model.state_dict().items():
        if "lora_" in name:
            continue
        layer, base, rest = name.partition(".base_layer.")
        made[f"{layer}.{rest}" if base else name] = value.detach()
        if rest == "weight":
            made[f"{layer}.weight"] = value.detach() + layers[layer].get_delta_weight(ADAPTER).detach()
    return made

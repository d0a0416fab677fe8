"""Counts the parameters of LoRA adapters from a model's shapes, before there are any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.policy.settings import UpdateSettings
from trainer.vision.family import family_from_config

ADAPTABLE = (torch.nn.Linear, torch.nn.Embedding)


def find_adapted_layers(model: Any, update: UpdateSettings) -> list[Any]:
    """The layers that get adapters: those that `update.lora.targets` names, by default all linear ones but the head.

    A vision encoder that is not trained gets none.
    """
    if update.lora is None:
        return []
    family = family_from_config(model.config.to_dict())
    frozen = f"{family.vision_module}." if family and not update.trains_vision else ""
    layers = []
    for name, layer in model.named_modules():
        if frozen and name.startswith(frozen):
            continue
        if update.lora.targets:
            is_adapted = any(_is_target(name, target) for target in update.lora.targets)
        else:
            is_adapted = isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
        if is_adapted and isinstance(layer, ADAPTABLE):
            layers.append(layer)
    return layers


def find_unknown_targets(model: Any, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names in `update.lora.targets` that fit no layer, and the last parts of those that would."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, ADAPTABLE)]
    unknown = [target for target in targets if not any(_is_target(name, target) for name in names)]
    return unknown, list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def count_adapter_parameters(model: Any, update: UpdateSettings) -> int:
    """How many parameters the adapters have: two matrices for each layer."""
    sides: int = sum(sum(layer.weight.shape) for layer in find_adapted_layers(model, update))
    return sides * update.lora.rank if update.lora else 0

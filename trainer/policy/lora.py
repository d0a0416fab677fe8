"""LoRA adapters: adds, saves and loads them, disables them for the reference, and merges them for the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from trainer.engine.base import Adapters, AdapterShape, PolicyWeights
from trainer.policy.memory_parts import find_targets_beside_experts
from trainer.policy.process_memory import trim_heap
from trainer.policy.settings import LoraSettings, PolicyError
from trainer.policy.shards import has_shards, load_model_tensors, read_model_sizes
from trainer.pretrained import load_adapter_config

ADAPTER_FILE, ADAPTER_SETTINGS_FILE = "adapter_model.safetensors", "adapter_config.json"
ADAPTER = "default"
MARK = "lora_"
"""What only the names of adapters' weights contain."""
NAME_PREFIX = "base_model.model."
"""The prefix of every tensor's name in a saved adapter."""


def add_adapters(model: PreTrainedModel, settings: LoraSettings, excluded_module: str = "") -> None:
    """Adds adapters, which are then the only trained weights. Their initial values are deterministic, and change
    nothing. The excluded part of the model gets none."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise PolicyError("`update.lora` needs the package peft", "pip install 'mtrl-rl[lora]'") from error
    targets = list(settings.target_modules) or find_targets_beside_experts(model) or "all-linear"
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        exclude_modules=rf".*{re.escape(excluded_module.rpartition('.')[2])}\..*" if excluded_module else None,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            inject_adapter_in_model(config, model, ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"`update.lora.target_modules`: {error}", "name layers of this model, or leave it out to adapt all"
            ) from error
    adapted: Any = model
    if adapted.peft_config[ADAPTER].target_parameters:  # Which peft takes names of an expert's layers for.
        raise PolicyError(
            "`update.lora`: experts and their routers get no adapters",
            "name layers of attention in `update.lora.target_modules`",
        )


def save_adapters(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Writes a folder that peft and transformers load on top of the model that the adapters were trained for."""
    from peft.utils import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(
        model, dict(weights), adapter_name=ADAPTER, save_embedding_layers=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {NAME_PREFIX + name: value.detach().cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    save_adapter_settings(model, folder, model.name_or_path)


def save_adapter_settings(model: Any, folder: Path, source: str | None) -> None:
    """Writes what the adapters are, and which model they were trained for."""
    adapters = model.peft_config[ADAPTER]
    adapters.base_model_name_or_path = source
    adapters.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's adapters, by their names in a file without its prefix."""
    if not has_shards(checkpoint):
        return {name.removeprefix(NAME_PREFIX): value for name, value in load_file(checkpoint / ADAPTER_FILE).items()}
    tensors = {name: torch.zeros(size) for name, size in read_model_sizes(checkpoint).items() if MARK in name}
    load_model_tensors(checkpoint, tensors)
    return {name.replace(f".{ADAPTER}.", "."): value for name, value in tensors.items()}


def load_adapters(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Loads what `read_adapters` returned; returns it by the names of the model's weights."""
    from peft.utils import set_peft_model_state_dict

    expected = sum(MARK in name for name in model.state_dict())
    if len(state) != expected:
        raise ValueError(f"it has {len(state)} matrices, but {expected} are trained")
    result: Any = set_peft_model_state_dict(model, dict(state), ADAPTER)
    if result.unexpected_keys:
        raise ValueError(f"it has {result.unexpected_keys[0]}, which is not trained")
    names = {file_name(name).removeprefix(NAME_PREFIX): name for name in model.state_dict() if MARK in name}
    return {names[name]: value for name, value in state.items()}


def attach_adapters(model: PreTrainedModel, checkpoint: Path) -> None:
    """Adds a checkpoint's adapters to the model that they were trained for."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(load_adapter_config(checkpoint), model, ADAPTER)
    load_adapters(model, read_adapters(checkpoint))


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[None]:
    """Runs the model as it was before training."""
    _enable_adapters(model, False)
    try:
        yield
    finally:
        _enable_adapters(model, True)


def _enable_adapters(model: PreTrainedModel, enabled: bool) -> None:
    # The model's own methods refuse releases of peft that work, and ask for some that are not out yet.
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled)


def merge_adapters(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """All weights with the adapters merged in, under the names that they have without adapters."""
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    weights = {}
    for name, value in model.state_dict().items():
        if MARK in name:
            continue
        layer, base, rest = name.partition(".base_layer.")
        weights[f"{layer}.{rest}" if base else name] = value.detach()
        if rest == "weight":
            whole = value.detach().float() + layers[layer].get_delta_weight(ADAPTER).detach()
            weights[f"{layer}.weight"] = whole.to(value.dtype)
    return weights


class LoraWeights(PolicyWeights):
    """A model's weights with adapters, which are merged when the weights are first read; or its adapters alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._merged: Mapping[str, Tensor] | None = None

    def merge(self) -> Mapping[str, Tensor]:
        """All weights as they are at the first call."""
        if self._merged is None:
            began = time.monotonic()
            self._merged = merge_adapters(self._model)
            self.gather_s += time.monotonic() - began
        return self._merged

    def free(self) -> None:
        """Drops the merged weights, which the engine has taken."""
        if self._merged is not None:
            self._merged = None
            trim_heap(self._model)

    def adapters(self) -> Adapters:
        named = {name: value.detach() for name, value in self._model.named_parameters() if MARK in name}
        return Adapters(adapter_shape(self._model), {file_name(name): value for name, value in named.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self.merge()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.merge())

    def __len__(self) -> int:
        return len(self.merge())


def adapter_shape(model: PreTrainedModel) -> AdapterShape:
    """What an engine has to know of the model's adapters."""
    config: Any = model.peft_config[ADAPTER]
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    return AdapterShape(config.r, float(config.lora_alpha), tuple(sorted(adapted)))


def file_name(name: str) -> str:
    """The name of an adapter's weight in a file, from that in the model."""
    return NAME_PREFIX + name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")

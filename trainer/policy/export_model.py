"""Exports a checkpoint's model as a folder, with its weights read as they are stored."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from trainer.model import SHARDS_FOLDER, build_skeleton, load_model
from trainer.policy import lora
from trainer.policy.policy import loading_checkpoint
from trainer.policy.settings import PolicyError
from trainer.policy.shards import has_shards, load_model_tensors, saved_tensors
from trainer.pretrained import load_config
from trainer.weight_files import WeightFiles


@dataclass
class StoredWeight:
    """The names of the stored tensors of a weight, in order."""

    converter: WeightConverter | None = None
    """What makes the weight from them, if it is not stored as it is."""
    names: dict[str | None, list[str]] = field(default_factory=dict)
    """By the converter's pattern, such as those of gates and of up projections."""

    @property
    def only_name(self) -> str | None:
        """The name of the one tensor that the weight is stored as; None if it has another form in the files."""
        names = self.names.get(None, [])
        return names[0] if len(self.names) == len(names) == 1 else None

    def has_experts(self, count: int) -> bool:
        """Whether the weight is a stack of so many experts, of which any part can be made by itself."""
        if self.converter is None or {*self.names} != {*self.converter.source_patterns}:
            return False
        first, *others = self.converter.operations
        return (
            all(len(names) == count for names in self.names.values())
            and isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
        )

    def stack_experts(self, experts: slice, read: Callable[[str], Tensor]) -> Tensor:
        """The weight's part that these experts are, in a tensor of its own."""
        rule = cast(WeightConverter, self.converter)
        tensors: dict[Any, Any] = {
            pattern: [read(name) for name in names[experts]] for pattern, names in self.names.items()
        }
        patterns = {"source_patterns": rule.source_patterns, "target_patterns": rule.target_patterns}
        for operation in rule.operations:
            tensors = operation.convert(tensors, **patterns)
        part: Tensor
        (part,) = tensors.values()
        return part


def find_stored_weights(model: PreTrainedModel, names: Iterable[str]) -> Mapping[str, StoredWeight]:
    """The stored tensors by the name of the weight that they belong to, as `from_pretrained` finds them.

    The model's modules must have their own classes still, by which transformers knows the rules.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern: dict[str | None, WeightConverter] = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    weights = {name.replace(".base_layer.", "."): torch.empty(0) for name in model.state_dict()}
    found: dict[str, StoredWeight] = {}
    for stored in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, weights)
        if name not in weights and stored in weights:
            name, pattern = stored, None
        weight = found.setdefault(name, StoredWeight(by_pattern.get(pattern)))
        weight.names.setdefault(pattern, []).append(stored)
    return found


def require_matching_weights(folder: Path, files: WeightFiles, model: PreTrainedModel) -> None:
    """Raises ConfigError for weight files whose tensors have other sizes or names than the model of the configuration.

    The model may be one without weights. Weights that are tied to each other need one tensor.
    """
    if not files.files:
        return
    stored = find_stored_weights(model, files.shapes)
    weights = dict(model.named_parameters(remove_duplicate=False))
    shapes = {weight.only_name or name: weights[name].shape for name, weight in stored.items() if name in weights}
    files.require_shapes(folder, shapes)
    names = {made for name, weight in stored.items() for made in _made_names(name, weight.converter)}
    found = {id(weights[name]) for name in names if name in weights}
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_missing or ("$^",)))
    missing = [name for name, weight in weights.items() if id(weight) not in found and not ignored.search(name)]
    known = model.state_dict()
    unknown = [weight.names[key][0] for name, weight in stored.items() if name not in known for key in weight.names]
    files.require_names(folder, missing, unknown)


def _made_names(name: str, rule: WeightConverter | None) -> list[str]:
    """The weights that a rule makes, of which `name` is the first: some split one tensor."""
    return [name] if rule is None else [name.replace(rule.target_patterns[0], made) for made in rule.target_patterns]


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
    configs = [load_config(folder) for folder in (checkpoint, start) if folder]
    texts = [config.get_text_config(decoder=True).to_dict() | {"model_type": config.model_type} for config in configs]
    for name in SIZES:
        values = [text.get(name) for text in texts]
        if values[0] != values[-1]:
            raise ValueError(f"it is of another model: {name} is {values[0]} there, not {values[-1]} as in {start}")


def _read_dtype(folder: Path) -> torch.dtype:
    """The dtype that a model's folder names."""
    if not (folder / "config.json").is_file():
        return torch.float32
    dtype = getattr(load_config(folder), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32

"""Finds the stored tensors that a weight is made of, by the rules of transformers for names and for stacked experts.

Mixture-of-experts models store each expert by itself, while their modules have one weight of all experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
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

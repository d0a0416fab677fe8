"""Reads a rank's part of a model's weights from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from gateway.errors import OperatorError
from trainer.model import load_model
from trainer.policy.export_model import StoredWeight, find_stored_weights

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ShardFiles:
    """The weights in a model's folder, read part by part.

    Stacked experts are made of the stored tensors of each. For weights that have yet another form in the files, the
    model is read as a whole.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._folder, self._model = folder, model
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._stored: Mapping[str, StoredWeight] = {}
        self._whole: Mapping[str, Tensor] | None = None

    def __enter__(self) -> Self:
        try:
            for file in sorted(set(self._list_files())):
                opened = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._stack.close()
            raise OperatorError(
                f"{self._folder}: the weights cannot be read: {error}; copy the folder again"
            ) from error
        self._stored = find_stored_weights(self._model, self._files)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, shape: torch.Size, place: tuple[slice, ...]) -> Tensor:
        """A part of a weight of the model, in float32."""
        stored = self._stored.get(name, StoredWeight())
        if stored.only_name and tuple((source := self._open(stored.only_name)).get_shape()) == tuple(shape):
            part: Tensor = source[place or slice(None)]
            return part.to(torch.float32, copy=True)  # Not the file's own memory, which changes when it is replaced.
        if shape and stored.has_experts(shape[0]):
            return self._read_experts(stored, shape, place)
        if self._whole is None:
            self._whole = load_model(self._folder).state_dict()
        if name not in self._whole:
            raise OperatorError(f"{self._folder}: it has no weight {name}; copy the folder again")
        return self._whole[name][place].clone()

    def _read_experts(self, stored: StoredWeight, shape: torch.Size, place: tuple[slice, ...]) -> Tensor:
        experts, *rest = place
        if not len(range(*experts.indices(shape[0]))):
            return torch.empty(torch.empty(shape, device="meta")[place].shape)
        part = stored.stack_experts(experts, lambda name: self._open(name)[:])
        return part[:, *rest].to(torch.float32)

    def _open(self, stored_name: str) -> Any:
        """A stored tensor, of which slices can be read."""
        return self._files[stored_name].get_slice(stored_name)

    def _list_files(self) -> list[str]:
        index = self._folder / INDEX_FILE
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [Path(file).name for file in files.values()]
        return [ONE_FILE] if (self._folder / ONE_FILE).is_file() else []

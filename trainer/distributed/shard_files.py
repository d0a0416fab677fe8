"""Reads a rank's part of a model's weights from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.model import ModelError, load_model

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ShardFiles:
    """The weights in a model's folder, read part by part.

    A model whose weights have another form in memory than in its files, such as stacked experts, is read as a whole.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._folder, self._model = folder, model
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._names: Mapping[str, str] = {}
        self._whole: Mapping[str, Tensor] | None = None

    def __enter__(self) -> Self:
        try:
            for file in sorted(set(self._list_files())):
                opened = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._stack.close()
            raise ModelError(f"{self._folder}: the weights cannot be read: {error}; copy the folder again") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, shape: torch.Size, place: tuple[slice, ...]) -> Tensor:
        """A part of a weight of the model, in float32."""
        source = self._find(name, shape)
        if source is not None:
            part: Tensor = source[place or slice(None)]
            return part.to(torch.float32, copy=True)  # Not the file's own memory, which changes when it is replaced.
        if self._whole is None:
            self._whole = load_model(self._folder).state_dict()
        if name not in self._whole:
            raise ModelError(f"{self._folder}: it has no weight {name}; copy the folder again")
        return self._whole[name][place].clone()

    def _find(self, name: str, shape: torch.Size) -> Any:
        """The weight's slices in a file; None if it has another name or form there."""
        placeholder = torch.empty(shape, device="meta")
        in_files = revert_weight_conversion(self._model, {name: placeholder})
        file_name = next(iter(in_files))
        if len(in_files) != 1 or in_files[file_name] is not placeholder or file_name not in self._files:
            return None
        found = self._files[file_name].get_slice(file_name)
        return found if tuple(found.get_shape()) == tuple(shape) else None

    def _list_files(self) -> list[str]:
        index = self._folder / INDEX_FILE
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [Path(file).name for file in files.values()]
        return [ONE_FILE] if (self._folder / ONE_FILE).is_file() else []

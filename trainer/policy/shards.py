"""The format of a checkpoint that several ranks wrote: tensors in torch's distributed format, the rest as JSON.

CHECKPOINT/shards/       weights and optimizer states, in as many files as there were ranks
CHECKPOINT/policy.json   the number of steps, and the optimizer's settings

It is read with any number of ranks, and by one process: each reads the rows that it has.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.model import SHARDS_FOLDER

POLICY_FILE = "policy.json"
INDEX_FILE = ".metadata"
MODEL, WEIGHTS, OPTIMIZER = "model", "weights", "optimizer"
MODEL_PREFIX = f"{MODEL}.{WEIGHTS}."


@dataclass(frozen=True)
class TrainedPart:
    """The policy's model or its critic, with its optimizer."""

    name: str
    tensors: Mapping[str, Tensor]
    """What is saved of it: parameters, and buffers."""
    optimizer: torch.optim.Optimizer

    @property
    def tensors_by_key(self) -> dict[str, Tensor]:
        """The tensors under their names in a checkpoint."""
        return {f"{self.name}.{WEIGHTS}.{name}": value.detach() for name, value in self.tensors.items()}

    @property
    def optimizer_by_key(self) -> dict[str, Tensor]:
        """The optimizer's state under its names in a checkpoint."""
        names = {id(value): name for name, value in self.tensors.items()}
        return {
            f"{self.name}.{OPTIMIZER}.{kind}.{names[id(parameter)]}": value
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
        }

    def allocate_optimizer(self, sizes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Gives the optimizer an empty state of the kind that a checkpoint has; the checkpoint's names for it."""
        self.optimizer.state.clear()
        allocated = {}
        for key in sizes:
            part, _, rest = key.partition(f".{OPTIMIZER}.")
            kind, _, name = rest.partition(".")
            if part == self.name and name in self.tensors:
                parameter = self.tensors[name]
                is_alike = tuple(sizes[key]) == tuple(parameter.shape)
                value = torch.zeros_like(parameter.detach()) if is_alike else torch.zeros(tuple(sizes[key]))
                self.optimizer.state[parameter][kind] = allocated[key] = value
        return allocated


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and the buffers that belong to its state; of tied weights, the first."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: value for name, value in module.state_dict().items() if name not in every}
    return {**dict(module.named_parameters()), **buffers}


def has_shards(checkpoint: Path) -> bool:
    """Whether several ranks wrote the checkpoint."""
    return (checkpoint / SHARDS_FOLDER).is_dir()


def dump_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups of parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def restore_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Gives the optimizer's groups settings that were stored as JSON, which has lists in place of tuples."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group |= {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def digest_file(file: Path) -> str:
    """The SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def write_policy_file(folder: Path, steps: int, parts: Sequence[TrainedPart]) -> None:
    """Writes what is not a tensor."""
    content = {"steps": steps, "groups": {part.name: dump_groups(part.optimizer.param_groups) for part in parts}}
    (folder / POLICY_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_steps(checkpoint: Path, parts: Sequence[TrainedPart]) -> int:
    """The optimizer steps made so far. Restores the settings of the optimizer too."""
    content = json.loads((checkpoint / POLICY_FILE).read_text(encoding="utf-8"))
    for part in parts:
        restore_groups(part.optimizer, content["groups"][part.name])
    return int(content["steps"])


class ShardReader(FileSystemReader):
    """Reads torch's format, whose index is a pickle, without executing anything from the folder."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / INDEX_FILE).open("rb") as file:
            index = IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise ValueError("it is no index of a checkpoint")
        return index


class IndexUnpickler(pickle.Unpickler):
    """Loads only the classes that an index consists of."""

    ALLOWED = frozenset(
        {
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        }
        | {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """A class by its name, a dtype, or what Python before 3.11.4 names members of an enumeration by."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index has")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it names a part of {kind}, which no index has")
    return kind[name]


def read_sizes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """The sizes of all tensors in a checkpoint, by their names there."""
    index = ShardReader(checkpoint / SHARDS_FOLDER).read_metadata()
    return {key: tuple(getattr(item, "size", ())) for key, item in index.state_dict_metadata.items()}


def require_same_tensors(sizes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError with the first weight that only the model or the checkpoint has, or in another size."""
    own = {key: tuple(value.shape) for key, value in tensors.items()}
    stored = {key: tuple(size) for key, size in sizes.items() if f".{OPTIMIZER}." not in key}
    for key in sorted(own.keys() | stored.keys()):
        name = key.replace(f".{WEIGHTS}.", ": ", 1)
        if key not in stored:
            raise ValueError(f"it is of another model: it has no {name}")
        if key not in own:
            raise ValueError(f"it is of another model, which has {name}")
        if own[key] != stored[key]:
            raise ValueError(f"it is of another model: {name} is {list(stored[key])} there, not {list(own[key])}")


def require_same_parts(checkpoint: Path, parts: Sequence[TrainedPart]) -> dict[str, tuple[int, ...]]:
    """Raises ValueError where the checkpoint is of another model; returns the sizes of its tensors."""
    sizes = read_sizes(checkpoint)
    require_same_tensors(sizes, {key: value for part in parts for key, value in part.tensors_by_key.items()})
    return sizes


def load_parts(checkpoint: Path, parts: Sequence[TrainedPart]) -> None:
    """Reads weights and optimizer states; on a rank, those that it has."""
    sizes = require_same_parts(checkpoint, parts)
    state: dict[str, Tensor] = {}
    for part in parts:
        state |= part.tensors_by_key | part.allocate_optimizer(sizes)
    load_tensors(checkpoint, state)


def read_model_sizes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """The sizes of the policy's own weights, by their names in the model."""
    sizes = read_sizes(checkpoint)
    return {key.removeprefix(MODEL_PREFIX): size for key, size in sizes.items() if key.startswith(MODEL_PREFIX)}


def load_model_tensors(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Reads the policy's own weights, without what is only needed for training on."""
    targets = {f"{MODEL_PREFIX}{name}": value.detach() for name, value in tensors.items()}
    sizes = read_sizes(checkpoint)
    require_same_tensors({key: size for key, size in sizes.items() if key.startswith(MODEL_PREFIX)}, targets)
    load_tensors(checkpoint, targets)


def load_tensors(checkpoint: Path, targets: dict[str, Tensor]) -> None:
    """Reads tensors by their names in the checkpoint into tensors of the same size."""
    with _plain_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(targets, storage_reader=ShardReader(checkpoint / SHARDS_FOLDER), no_dist=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises the first cause of torch's error, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise first_failure(error) from error


def first_failure(error: CheckpointException) -> Exception:
    """The error of the first rank that failed."""
    _, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return cause if isinstance(cause, Exception) else RuntimeError(f"{type(cause).__name__}: {cause}")

"""Reads the headers of a model's weight files: how many parameters they hold, and whether all of them are whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError, ConfigErrors

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""A file begins with the length of its header, in so many bytes."""
MAX_HEADER = 100_000_000
COPY_AGAIN = "copy or download the file again"


def _read_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


UMASK = _read_umask()
"""Read once, since it can only be read by setting it, which other threads would notice."""


def share_weight_files(folder: Path) -> None:
    """Gives weight files the permissions of other new files: safetensors lets only their owner read them."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~UMASK)


class _Damaged(Exception):
    """A weight file that cannot be what was written; the text says why."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights in a model's folder, as the headers of its safetensors files describe them."""

    parameters: int
    """0 if the weights are in another format."""
    files: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By the names of tensors."""

    def require_names(self, folder: Path, missing: Sequence[str], unknown: Sequence[str]) -> None:
        """Raises ConfigError for weights that are in no file, and so would be random; `unknown` are unused tensors."""
        if missing:
            problem = f"{_count(missing)} in no weight file, and would be random"
            problem += f"; the model does not know {_count(unknown, verb='')} in them" if unknown else ""
            remedy = "copy config.json and the weight files from the same model, or save it with `save_pretrained`"
            raise ConfigError(problem, file=folder / "config.json", field="model", remedy=remedy)

    def require_shapes(self, folder: Path, expected: Mapping[str, Sequence[int]]) -> None:
        """Raises ConfigError for a configuration that describes other weights.

        Only sizes of tensors with the same name are compared: transformers renames and transposes some as it loads.
        """
        wrong = [name for name, shape in expected.items() if prod(self.shapes.get(name, shape)) != prod(shape)]
        if wrong:
            name, more = wrong[0], f"; so are {len(wrong) - 1} more" if len(wrong) > 1 else ""
            stored, described = (" x ".join(map(str, shape)) for shape in (self.shapes[name], expected[name]))
            problem = f"{name} is {described} by it, but {stored} in the weight files{more}"
            remedy = "copy config.json and the weight files from the same model"
            raise ConfigError(problem, file=folder / "config.json", field="model", remedy=remedy)


def _count(names: Sequence[str], verb: str = " is") -> str:
    """The first of some tensors, and how many there are besides."""
    more = len(names) - 1
    return f"{names[0]} and {more} more{' are' * bool(verb)}" if more else f"{names[0]}{verb}"


def read_weight_files(folder: Path) -> WeightFiles:
    """Checks that each file is there in its full length. Raises ConfigErrors with all that are not."""
    errors: list[ConfigError] = []
    shapes: dict[str, tuple[int, ...]] = {}
    parameters = files = 0
    for file in _list_files(folder, errors):
        try:
            in_file = _read_shapes(file)
            shapes |= in_file
            parameters += sum(map(prod, in_file.values()))
            files += 1
        except (_Damaged, OSError) as error:
            errors.append(ConfigError(str(error), file=file, field="model", remedy=COPY_AGAIN))
    if errors:
        raise errors[0] if len(errors) == 1 else ConfigErrors(errors)
    if not files and (folder / "config.json").is_file() and not any(folder.glob("*.bin")):
        remedy = "copy the whole folder, as `save_pretrained` writes it"
        raise ConfigError("has no weights (*.safetensors)", file=folder, field="model", remedy=remedy)
    return WeightFiles(parameters, files, shapes)


def _list_files(folder: Path, errors: list[ConfigError]) -> Iterator[Path]:
    """The files that the index names, or else those that are there."""
    index = folder / INDEX_FILE
    if not index.is_file():
        yield from sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"cannot be read ({type(error).__name__})"
        errors.append(ConfigError(problem, file=index, field="model", remedy=COPY_AGAIN))
        return
    for name in sorted(map(str, names)):
        if (folder / name).is_file():
            yield folder / name
        else:
            problem = f"is missing, but {INDEX_FILE} names it"
            errors.append(ConfigError(problem, file=folder / name, field="model", remedy="copy this file as well"))


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(MAX_HEADER, size - LENGTH_BYTES):
            raise _Damaged(f"is cut off or no safetensors file: its header does not fit into {size:,} bytes")
        try:
            header: Mapping[str, Any] = json.loads(stream.read(length))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
            shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise _Damaged(f"is no safetensors file: its header cannot be read ({type(error).__name__})") from error
    expected = LENGTH_BYTES + length + end
    if size != expected:
        raise _Damaged(f"has {size:,} bytes, but its header describes {expected:,}: it is cut off or damaged")
    return shapes

"""What ranks must have in common, compared before weights are loaded: package versions, settings and model files."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer.distributed.errors import RankError
from trainer.rollout.settings import flatten_settings

VERSIONS = ("mtrl-rl", "torch", "transformers", "safetensors", "peft", "Pillow", "torchvision")
MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*processor_config.json")
SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Of a large file, so many parts of so many bytes are compared."""
OWN_SETTINGS = ("out", "report", "distributed.ranks", "distributed.restarts")
"""Settings that concern rank 0 alone."""
SHOWN = 3


def find_versions() -> dict[str, str]:
    """The versions of packages that determine what a step computes."""
    return {name: _version(name) for name in VERSIONS} | {"python": platform.python_version()}


def digest_model(folder: Path) -> dict[str, str]:
    """A digest of each file of the model; of a large one, of its size and of samples."""
    return {file.name: _digest(file) for pattern in MODEL_FILES for file in sorted(folder.glob(pattern))}


def require_alike(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """Raises RankError with the first rank that differs from rank 0. A rank without settings has those of rank 0."""
    for rank, other in enumerate(others, 1):
        for kind, remedy in REMEDIES.items():
            if other[kind] is None or own[kind] is None:
                continue
            first, second = _flatten(kind, own[kind]), _flatten(kind, other[kind])
            different = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
            if different:
                text = "; ".join(_describe(kind, name, first, second) for name in different[:SHOWN])
                more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
                raise RankError(f"{names[rank]} has other {kind} than rank 0: {text}{more}", remedy)


REMEDIES = {
    "versions": "install the same versions on all machines",
    "settings": "start all ranks with the same command and run file",
    "model files": "copy the model's folder to all machines again",
}


def _describe(kind: str, name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    if kind == "model files":
        return f"{name} {'differs' if name in first and name in second else 'is missing on one of them'}"
    return f"{name} is {second.get(name)!r}, not {first.get(name)!r}"


def _flatten(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if kind != "settings":
        return dict(values)
    return {name: value for name, value in flatten_settings(dict(values)).items() if name not in OWN_SETTINGS}


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = sha256(str(size).encode())
    with file.open("rb") as stream:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(stream.read())
        else:
            for sample in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

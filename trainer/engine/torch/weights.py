"""The engine's copy of the weights, fused where one product computes several projections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.engine.base import EngineError


class FusedWeights:
    """Tensors under the engine's names, each a concatenation of the model's: `fused[name]` lists them in order."""

    def __init__(self, fused: Mapping[str, tuple[str, ...]], state: Mapping[str, Tensor]) -> None:
        self._fused = fused
        self._shapes = {name: state[name].shape for name in source_names(fused)}
        self._known = frozenset(state)
        self._tensors = {name: torch.cat([state[part].detach() for part in parts]) for name, parts in fused.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None."""
        return self._tensors.get(name)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies new weights, all or none: names and shapes are checked first."""
        check_weights(weights, self._shapes, self._known)
        for name, parts in self._fused.items():
            offset = 0
            for part in parts:
                rows = self._shapes[part][0]
                self._tensors[name][offset : offset + rows].copy_(weights[part])
                offset += rows


def source_names(fused: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The names of the model's tensors that are used."""
    return {part for parts in fused.values() for part in parts}


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], known: Iterable[str]) -> None:
    """Raises EngineError unless the weights are this model's: every tensor, of its shape, and no others."""
    missing = sorted(shapes.keys() - weights.keys())
    unknown = sorted(weights.keys() - set(known))
    if missing or unknown:
        raise EngineError(
            "the published weights are not this model's: "
            + "; ".join(
                f"{len(names)} {problem}, as {names[0]!r}"
                for problem, names in (("missing", missing), ("unknown", unknown))
                if names
            )
            + "; publish the state_dict of the same model"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise EngineError(f"the published {name!r} has shape {tuple(weights[name].shape)}, not {tuple(shape)}")

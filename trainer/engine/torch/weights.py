"""The engine's weights: a copy, fused where one product computes several projections, or the trainer's own tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from trainer.engine.base import EngineError

Holding = Literal["copied", "shared", "bfloat16"]
"""How the engine holds matrices: as a copy; as the trainer's own tensors, which is right only while no update runs
beside rollouts; or as a copy in bfloat16. Vectors are always copied."""
MATRIX = 2
"""The number of a matrix's dimensions."""


class FusedWeights:
    """Tensors under the engine's names, each a concatenation of the model's: `fused[name]` lists them in order."""

    def __init__(
        self, fused: Mapping[str, tuple[str, ...]], state: Mapping[str, Tensor], holding: Holding = "copied"
    ) -> None:
        self._fused, self._shares = fused, holding == "shared"
        self._shapes = {name: state[name].shape for parts in fused.values() for name in parts}
        self._known = frozenset(state)
        self._tensors: dict[str, Tensor] = {}
        self._shared: dict[str, tuple[Tensor, ...]] = {}
        """The trainer's matrices by the engine's names, which are not concatenated."""
        for name, parts in fused.items():
            tensors = [state[part].detach() for part in parts]
            if self._shares and tensors[0].ndim == MATRIX:
                self._shared[name] = tuple(tensors)
            elif holding == "bfloat16" and tensors[0].ndim == MATRIX:
                self._tensors[name] = torch.cat([tensor.bfloat16() for tensor in tensors])
            else:
                self._tensors[name] = torch.cat(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._shared[name][0] if name in self._shared else self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor, or None."""
        return self[name] if name in self._fused else None

    def matrices(self, name: str) -> tuple[Tensor, ...]:
        """The matrices whose products, side by side, are the named projection."""
        return self._shared[name] if name in self._shared else (self._tensors[name],)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes new weights, all or none: names and shapes are checked first. Shared ones stay where they are."""
        check_weights(weights, self._shapes, self._known)
        for name, parts in self._fused.items():
            if name in self._shared:
                self._shared[name] = tuple(weights[part].detach() for part in parts)
                continue
            offset = 0
            for part in parts:
                rows = self._shapes[part][0]
                self._tensors[name][offset : offset + rows].copy_(weights[part])
                offset += rows


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

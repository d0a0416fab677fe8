"""An engine keeps its own copy of the weights, joined where one product does the work of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.engine.base import EngineError


class Weights:
    """Tensors under the engine's own names, each made of the model's: `joined[name]` lists them in order."""

    def __init__(self, joined: Mapping[str, tuple[str, ...]], state: Mapping[str, Tensor]) -> None:
        self._joined = joined
        self._shapes = {name: state[name].shape for name in sources(joined)}
        self._known = frozenset(state)
        self._tensors = {name: torch.cat([state[part].detach() for part in parts]) for name, parts in joined.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """All or nothing: names and shapes are checked before the first number changes."""
        check(weights, self._shapes, self._known)
        for name, parts in self._joined.items():
            at = 0
            for part in parts:
                rows = self._shapes[part][0]
                self._tensors[name][at : at + rows].copy_(weights[part])
                at += rows


def sources(joined: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {part for parts in joined.values() for part in parts}


def check(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], known: Iterable[str]) -> None:
    """Published weights must be this model's: every tensor, each of its shape, and no other."""
    missing = sorted(shapes.keys() - weights.keys())
    strange = sorted(weights.keys() - set(known))
    if missing or strange:
        raise EngineError(
            "the published weights are not this model's: "
            + "; ".join(
                f"{len(names)} {what}, as {names[0]!r}"
                for what, names in (("missing", missing), ("unknown", strange))
                if names
            )
            + "; publish the state_dict of the same model"
        )
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise EngineError(f"the published {name!r} has shape {tuple(weights[name].shape)}, not {tuple(shape)}")

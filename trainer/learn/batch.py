"""A batch is what was written, end to end: no padding, and each token knows which rollout it belongs to.

Two rollouts of one group, `q q a` with reward 1 and `q q b b` with reward 0, where `q` is the task's:

    ids_T         q   q   a   q   q   b   b
    sequence_T    0   0   0   1   1   1   1
    mask_T        -   -   x   -   -   x   x      the policy wrote it
    weights_T     0   0   1   0   0   1   1      how much it counts; more than 0 only where the mask is set
    advantages_T  0   0  .7   0   0 -.7 -.7
    engine_T      0   0 -.4   0   0 -.2 -.9      the logprob of this very token, when it was sampled
    group_S       0           0

All `_T` line up: a logprob at t is that of `ids_T[t]` given what stands before it in its own sequence, so that a
model's output at t - 1 is scored at t. The first token of a sequence has nothing before it, and no policy wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gateway.types import Image
from trainer.learn.finite import NotFinite
from trainer.learn.segments import count, places, total
from trainer.ledger import Place

NUMBERS = {
    "weights_T": "a weight of",
    "advantages_T": "an advantage of",
    "engine_T": "an engine logprob of",
    "old_T": "an old logprob of",
    "ref_T": "a reference logprob of",
}
"""What each is called where it is none."""


@dataclass(frozen=True, slots=True)
class Row:
    """One ledger with what its tokens are worth. A rollout of several ledgers makes several rows."""

    name: str
    """What errors call the rollout."""
    ids: Sequence[int]
    mask: Sequence[bool]
    engine: Sequence[float]
    """The logprobs at sampling; 0.0 where nothing was sampled."""
    advantages: Sequence[float]
    weights: Sequence[float]
    group: int = 0
    stale: Sequence[bool] = ()
    """The tokens that other weights sampled than those which learn; left out where there are none."""
    pictures: Sequence[Place] = ()
    """Where they stand among the ids, as wide as the model sees them."""


@dataclass(frozen=True)
class Batch:
    """Packed rows. What the new policy makes of them is no part of it: that changes with every step."""

    ids_T: Tensor
    mask_T: Tensor
    weights_T: Tensor
    advantages_T: Tensor
    engine_T: Tensor
    old_T: Tensor
    """By the trainer, from the weights that sampled; the engine's own where those are known to be exact, and of what is
    stale, whose weights are gone."""
    sequence_T: Tensor
    group_S: Tensor
    names_S: tuple[str, ...]
    ref_T: Tensor | None = None
    """By the reference policy, where a KL term asks for it."""
    stale_T: Tensor | None = None
    """Sampled by other weights than those which learn; None where nothing was."""
    images: tuple[Image, ...] = ()
    """What is shown, each once. An id below 0 is a place in one of them: -1 is the first of the first."""

    def __post_init__(self) -> None:
        tokens = {name: values for name, values in vars(self).items() if name.endswith("_T") and values is not None}
        sizes = {name: tuple(values.shape) for name, values in tokens.items()}
        if set(sizes.values()) != {(len(self.ids_T),)}:
            raise ValueError(f"tokens of a batch lie on one axis, and these do not line up: {sizes}")
        if len(self.names_S) != self.sequences or tuple(self.group_S.shape) != (self.sequences,):
            raise ValueError(f"{self.sequences} names for groups of shape {tuple(self.group_S.shape)}")
        if self.mask_T.dtype != torch.bool:
            raise ValueError(f"the mask is true or false for each token, and not {self.mask_T.dtype}")
        sizes_S = count(self.sequence_T, self.sequences)
        if len(sizes_S) > self.sequences or bool((sizes_S == 0).any()) or bool((self.sequence_T.diff() < 0).any()):
            raise ValueError("sequences lie end to end in order, and each has a token")
        for name, what in NUMBERS.items():
            if name in tokens:
                self.finite(what, tokens[name], self.mask_T)
        self._written()

    def _written(self) -> None:
        """What is trained was written by the policy, after something."""
        if (unwritten := (self.weights_T != 0) & ~self.mask_T).any():
            raise ValueError(f"{self.where(unwritten)} has a weight, and the policy did not write it")
        if (negative := self.weights_T < 0).any():
            raise ValueError(f"{self.where(negative)} has a negative weight")
        if (first := self.mask_T & (places(self.sequence_T) == 0)).any():
            raise ValueError(f"{self.where(first)} comes first, and nobody can write after nothing")

    def to(self, device: torch.device | str) -> Batch:
        tensors = {name: values for name, values in vars(self).items() if torch.is_tensor(values)}
        moved: dict[str, Any] = {name: values.to(device) for name, values in tensors.items()}
        return replace(self, **moved)

    @property
    def sequences(self) -> int:
        return len(self.names_S)

    @property
    def trained_T(self) -> Tensor:
        """The tokens that the loss sees."""
        return self.weights_T > 0

    @property
    def fresh_T(self) -> Tensor:
        """Of these, the ones that the weights which learn have sampled."""
        return self.trained_T if self.stale_T is None else self.trained_T & ~self.stale_T

    def aged(self, own_T: Tensor, proximal: bool = False) -> Batch:
        """With the trainer's logprobs from before a step for the old policy's. What is stale keeps those that it was
        sampled with, unless the ratio is to be to the proximal policy: `mismatch` weighs what lies between."""
        if self.stale_T is None or proximal:
            return replace(self, old_T=own_T)
        return replace(self, old_T=torch.where(self.stale_T, self.engine_T, own_T))

    def total_S(self, values_T: Tensor) -> Tensor:
        return total(values_T, self.sequence_T, self.sequences)

    def mean_S(self, values_T: Tensor, among_T: Tensor) -> Tensor:
        """Of each sequence, the mean over the tokens `among_T`; 0 where it has none."""
        kept_T = torch.where(among_T, values_T, 0)
        return self.total_S(kept_T) / self.total_S(among_T.to(values_T.dtype)).clamp(min=1)

    def finite(self, what: str, values_T: Tensor, among_T: Tensor) -> None:
        """Complains of the first number among these tokens that is none, by its rollout."""
        if (wrong := among_T & ~values_T.isfinite()).any():
            value = float(values_T[wrong][0])
            raise NotFinite(f"{self.where(wrong)} has {what} {value}; its rollout has to be left out or looked into")

    def where(self, wrong_T: Tensor) -> str:
        """The first of these tokens as a person finds it again."""
        token = int(wrong_T.nonzero()[0])
        place = int(places(self.sequence_T)[token])
        return f"rollout {self.names_S[int(self.sequence_T[token])]}: token {place} (id {int(self.ids_T[token])})"


def pack(rows: Sequence[Row]) -> Batch:
    """Rows end to end. The engine's logprobs stand for the old policy's until others are put in their place."""
    for row in rows:
        sizes = {name: len(getattr(row, name)) for name in ("ids", "mask", "engine", "advantages", "weights")}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"rollout {row.name}: its tokens do not line up: {sizes}")

    def floats(name: str) -> Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=torch.float32)

    engine_T = floats("engine")
    ids, images = shown(rows)
    stale = [flag for row in rows for flag in row.stale or (False,) * len(row.ids)]
    return Batch(
        ids_T=torch.tensor(ids, dtype=torch.long),
        mask_T=torch.tensor([written for row in rows for written in row.mask], dtype=torch.bool),
        weights_T=floats("weights"),
        advantages_T=floats("advantages"),
        engine_T=engine_T,
        old_T=engine_T,
        sequence_T=torch.tensor([number for number, row in enumerate(rows) for _ in row.ids], dtype=torch.long),
        group_S=torch.tensor([row.group for row in rows], dtype=torch.long),
        names_S=tuple(row.name for row in rows),
        stale_T=torch.tensor(stale, dtype=torch.bool) if any(stale) else None,
        images=images,
    )


def shown(rows: Sequence[Row]) -> tuple[list[int], tuple[Image, ...]]:
    """The rows' ids, those that stand for pictures counted down over all pictures: so the same place in the same
    picture is the same id, and in another picture it is another."""
    ids: list[int] = []
    known: dict[Image, range] = {}
    free = -1
    for row in rows:
        begun = len(ids)
        ids += row.ids
        for place in row.pictures:
            if isinstance(place.medium, Image):
                if place.medium not in known:
                    known[place.medium] = range(free, free - place.stop + place.start, -1)
                    free -= place.stop - place.start
                ids[begun + place.start : begun + place.stop] = known[place.medium]
    return ids, tuple(known)

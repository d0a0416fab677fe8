"""A model that sees is one that reads, to which pictures are handed among the words, each looked at once."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trainer.engine.torch.attention import Reads
from trainer.engine.torch.dense import TILE, Dense
from trainer.engine.torch.forward import Piece
from trainer.engine.torch.slab import Slab
from trainer.engine.torch.weights import check
from trainer.vision.eyes import Picture
from trainer.vision.family import Family, Seen

KEPT = 2**28
"""Bytes of what was seen that are kept at hand."""


class Seeing(Dense):
    """A copy of the model's eyes as well. A picture alone is seen alike, whatever else there is to see."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        super().__init__(model)
        self._family = family
        self._eyes = copy.deepcopy(model.get_submodule(family.eyes)).train(False)
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        """By content, under these weights."""

    def take(self, weights: Mapping[str, Tensor]) -> None:
        eyes = f"{self._family.eyes}."
        state = {eyes + name: value for name, value in self._eyes.state_dict().items()}
        check(weights, {name: value.shape for name, value in state.items()}, weights)
        super().take(weights)
        self._eyes.load_state_dict({name.removeprefix(eyes): weights[name] for name in state})
        self._seen.clear()

    def __call__(self, pieces: Sequence[Piece], slab: Slab) -> Tensor:
        if not any(piece.sight for piece in pieces):
            return super().__call__(pieces, slab)
        reads = Reads(pieces, self.shape)
        padding = -reads.count % TILE
        ids = [max(token, 0) for piece in pieces for token in piece.ids] + [0] * padding
        x = F.embedding(torch.tensor(ids, device=self.shape.device), self._weights["embed"])
        deep = self._show(pieces, x)
        return self._run(x, self._placed(pieces, padding), reads, slab, deep)

    def _show(self, pieces: Sequence[Piece], x: Tensor) -> list[Tensor]:
        """Puts what is seen in the places of pictures; what is to be added to it later."""
        deep: list[Tensor] = []
        for at, picture, part in _pictures(pieces):
            seen = self._look(picture)
            span = slice(at, at + part.stop - part.start)
            x[span] = seen.rows_FD[part]
            deep = deep or [torch.zeros_like(x) for _ in seen.deep]
            for layer, rows_FD in zip(deep, seen.deep, strict=True):
                layer[span] = rows_FD[part]
        return deep

    def _placed(self, pieces: Sequence[Piece], padding: int) -> tuple[Tensor, Tensor]:
        places = torch.cat([*map(_places, pieces), torch.zeros(3, padding, dtype=torch.long)], dim=1)
        places = places.to(self.shape.device)
        if all(piece.sight is None or piece.start >= len(piece.sight.ids) for piece in pieces):  # as while writing
            return self._turned(max(piece.end for piece in pieces), places[0])
        cos, sin = self._rotated(places[:, None])
        return cos[:, None], sin[:, None]

    def _look(self, picture: Picture) -> Seen:
        if picture.digest not in self._seen:
            device = self.shape.device
            pixels = picture.pixels.to(device, self.shape.dtype)
            self._seen[picture.digest] = self._family.see(
                self._eyes, pixels, torch.tensor([picture.grid], device=device)
            )
        self._seen.move_to_end(picture.digest)
        while len(self._seen) > 1 and sum(map(_size, self._seen.values())) > KEPT:
            self._seen.popitem(last=False)
        return self._seen[picture.digest]


def _pictures(pieces: Sequence[Piece]) -> Iterator[tuple[int, Picture, slice]]:
    """Those in the pieces: where among all the tokens, which, and which of its rows."""
    begun = 0
    for piece in pieces:
        for start, picture in piece.sight.pictures if piece.sight else ():
            part = slice(max(0, piece.start - start), min(picture.width, piece.end - start))
            if part.start < part.stop:
                yield begun + start + part.start - piece.start, picture, part
        begun += len(piece.ids)


def _places(piece: Piece) -> Tensor:
    """Axes: of places, token."""
    if piece.sight is None:
        return torch.arange(piece.start, piece.end).expand(3, -1)
    asked = len(piece.sight.ids)
    near = piece.sight.places_3N[:, piece.start : min(piece.end, asked)]
    later = torch.arange(max(piece.start, asked), max(piece.end, asked))
    return torch.cat([near, (later + piece.sight.ahead).expand(3, -1)], dim=1)


def _size(seen: Seen) -> int:
    return seen.rows_FD.nbytes + sum(rows_FD.nbytes for rows_FD in seen.deep)

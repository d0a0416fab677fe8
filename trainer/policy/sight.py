"""What a reader's pictures are to its model: each is looked at once, however many rows it is shown in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.vision.eyes import Eyes, Picture


def words_of(model: PreTrainedModel) -> Any:
    """The part of a model that reads; all of it, where there is no other."""
    return getattr(model.base_model, "language_model", model)


class Sight:
    """Ids below 0 are places in the images, counted down from the first of the first: see `trainer.learn.batch`."""

    def __init__(self, model: PreTrainedModel, eyes: Eyes, images: Sequence[Image]) -> None:
        self._model, self._eyes, self._images, self._family = model, eyes, images, eyes.family
        self._pictures: list[Picture] = [eyes.look(image) for image in images]
        self._begun: dict[int, Picture] = {}
        """By the id of its first place."""
        free = -1
        for picture in self._pictures:
            self._begun[free] = picture
            free -= picture.width

    def wide(self, ids: Sequence[int]) -> list[int]:
        """Ids that have one place for each of the images, with all of their places."""
        free = count(-1, -1)
        shown = self._eyes.sight(ids, self._images).ids
        return [next(free) if token < 0 or token == self._family.image else token for token in shown]

    def together(self, ids_U: Tensor, places_3U: Tensor) -> dict[str, Any]:
        """For the part that reads, whatever stands in a row with whatever."""
        seen = self._family.see(self._model.get_submodule(self._family.eyes), *self._shown())
        at_U = ids_U < 0
        of_F = -1 - ids_U[at_U]
        words_UD = self._model.get_input_embeddings()(ids_U.clamp(min=0))
        shown_UD = words_UD.index_put((at_U,), seen.rows_FD[of_F].to(words_UD.dtype))
        given: dict[str, Any] = {"inputs_embeds": shown_UD[None], "position_ids": places_3U[:, None]}
        if seen.deep:
            given |= {
                "visual_pos_masks": at_U[None],
                "deepstack_visual_embeds": [rows_FD[of_F] for rows_FD in seen.deep],
            }
        return given

    def alone(self, ids_L: Tensor) -> Mapping[str, Tensor]:
        """For the whole model, a row by itself, as transformers has it."""
        mine = [self._begun[token] for token in ids_L.tolist() if token in self._begun]
        at_L = ids_L < 0
        given = {"input_ids": torch.where(at_L, self._family.image, ids_L)[None]}
        if mine:
            pixels, grids = self._shown(mine)
            given |= {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": at_L[None].int()}
        return given

    def places(self, ids_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Each token's place in its row, on three axes."""
        borders = [0, *(sequence_T.diff().nonzero()[:, 0] + 1).tolist(), len(ids_T)]
        ids = ids_T.tolist()
        parts = []
        for start, stop in pairwise(borders):
            row = ids[start:stop]
            grids = [(at, self._begun[token].grid) for at, token in enumerate(row) if token in self._begun]
            parts.append(self._family.places(len(row), grids))
        return torch.cat(parts, dim=1).to(ids_T.device)

    def _shown(self, pictures: Sequence[Picture] | None = None) -> tuple[Tensor, Tensor]:
        shown = self._pictures if pictures is None else pictures
        device = self._model.device
        pixels = torch.cat([one.pixels for one in shown]).to(device, self._model.dtype)
        return pixels, torch.tensor([one.grid for one in shown], device=device)

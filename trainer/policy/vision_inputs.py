"""A vision-language model's inputs for training: image embeddings, positions and ids. Each image is encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.model import device_of
from trainer.vision.image_processor import ImageProcessor, PreparedImage


def language_model_of(model: PreTrainedModel) -> Any:
    """The language model inside a vision-language model, or else the model itself."""
    return getattr(model.base_model, "language_model", model)


class VisionInputs:
    """The images of a batch. Ids below 0 are positions in them, counted down as in `trainer.algorithms.packing`."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor, images: Sequence[Image]) -> None:
        self._model, self._processor, self._images, self._family = model, processor, images, processor.family
        self._prepared: list[PreparedImage] = [processor.prepare(image) for image in images]
        self._by_first_id: dict[int, PreparedImage] = {}
        next_id = -1
        for image in self._prepared:
            self._by_first_id[next_id] = image
            next_id -= image.token_count

    def expand_ids(self, ids: Sequence[int]) -> list[int]:
        """Replaces the one id per image by negative ids for all of its tokens."""
        next_id = count(-1, -1)
        expanded = self._processor.prepare_prompt(ids, self._images).ids
        return [next(next_id) if token < 0 or token == self._family.image_id else token for token in expanded]

    def build_forest_inputs(self, ids_U: Tensor, positions_3U: Tensor) -> dict[str, Any]:
        """Inputs of the language model for all nodes of a forest at once."""
        vision_module = self._model.get_submodule(self._family.vision_module)
        features = self._family.encode(vision_module, *self._stack_pixels(self._prepared))
        is_image_U = ids_U < 0
        feature_F = -1 - ids_U[is_image_U]
        embeddings_UD = self._model.get_input_embeddings()(ids_U.clamp(min=0))
        image_FD = features.features_FD[feature_F].to(embeddings_UD.dtype)
        embeddings_UD = embeddings_UD.index_put((is_image_U,), image_FD)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings_UD[None], "position_ids": positions_3U[:, None]}
        if features.deepstack:
            inputs |= {
                "visual_pos_masks": is_image_U[None],
                "deepstack_visual_embeds": [features_FD[feature_F] for features_FD in features.deepstack],
            }
        return inputs

    def build_row_inputs(self, ids_L: Tensor) -> Mapping[str, Tensor]:
        """Inputs of the whole model for a single sequence, as transformers takes them."""
        images = [self._by_first_id[token] for token in ids_L.tolist() if token in self._by_first_id]
        is_image_L = ids_L < 0
        inputs = {"input_ids": torch.where(is_image_L, self._family.image_id, ids_L)[None]}
        if images:
            pixels, grids = self._stack_pixels(images)
            inputs |= {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image_L[None].int()}
        return inputs

    def compute_positions(self, ids_T: Tensor, sequence_T: Tensor) -> Tensor:
        """Each token's position in its sequence, on three axes."""
        bounds = [0, *(sequence_T.diff().nonzero()[:, 0] + 1).tolist(), len(ids_T)]
        ids = ids_T.tolist()
        parts = []
        for start, stop in pairwise(bounds):
            row = ids[start:stop]
            grids = [
                (index, self._by_first_id[token].grid) for index, token in enumerate(row) if token in self._by_first_id
            ]
            parts.append(self._family.compute_positions(len(row), grids))
        return torch.cat(parts, dim=1).to(ids_T.device)

    def _stack_pixels(self, images: Sequence[PreparedImage]) -> tuple[Tensor, Tensor]:
        device = device_of(self._model)
        pixels = torch.cat([image.pixels for image in images]).to(device, self._model.dtype)
        return pixels, torch.tensor([image.grid for image in images], device=device)

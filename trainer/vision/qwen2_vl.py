"""Qwen2-VL: squares of patches are one id each, and stand in a plane whose rows and columns are places of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.vision.family import Grid, Layout, Seen

BOUNDS = ("shortest_edge", "longest_edge")
"""Of all pixels, whatever they are called."""
BARRED = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen2VL:
    layout: Layout = "user_message"
    """Its template knows no tools; those that people put in its place mostly write text alone for them."""
    chat: str | None = "qwen2_vl"
    eyes = "model.visual"
    words = "model.language_model"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.image: int = config["image_token_id"]
        self.barred = _ids(config, *BARRED)
        self.frame = _ids(config, "vision_start_token_id"), _ids(config, "vision_end_token_id")
        self._merge: int = config["vision_config"]["spatial_merge_size"]

    def processor(self, folder: Path) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)

    def sides(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, least, most = processor.patch_size * self._merge, *(processor.size[name] for name in BOUNDS)
        sides = smart_resize(height, width, factor, least, most)[::-1]
        return (int(sides[0]), int(sides[1]))

    def width(self, grid: Grid) -> int:
        time, height, width = grid
        return time * (height // self._merge) * (width // self._merge)

    def places(self, count: int, pictures: Sequence[tuple[int, Grid]]) -> Tensor:
        """Text goes on in a line; a picture takes as much of it as its longer side."""
        parts, done, place = [], 0, 0
        for start, (time, height, width) in pictures:
            parts.append(torch.arange(place, place + start - done).expand(3, -1))
            place += start - done
            sides = (time, height // self._merge, width // self._merge)
            axes = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
            parts.append(torch.stack([axis.flatten() for axis in axes]) + place)
            place += max(sides[1:])
            done = start + parts[-1].shape[1]
        return torch.cat([*parts, torch.arange(place, place + count - done).expand(3, -1)], dim=1)

    def see(self, eyes: nn.Module, pixels: Tensor, grids: Tensor) -> Seen:
        return Seen(eyes(pixels, grid_thw=grids).pooler_output)


def _ids(config: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(int(config[name]) for name in names if config.get(name) is not None)

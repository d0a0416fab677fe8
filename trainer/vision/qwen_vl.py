"""The Qwen-VL families: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with their multimodal RoPE positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from gateway.errors import ConfigError
from trainer.pretrained import load_image_processor
from trainer.vision.family import Grid, ImageFeatures, ImageLayout

try:
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )
except ImportError as error:  # Some earlier releases also have wrong gradients where images are packed.
    problem = f"models that see need transformers 5.17 or newer, and this is {transformers.__version__}"
    raise ConfigError(problem, remedy="pip install --upgrade transformers") from error

PIXEL_BOUNDS = ("shortest_edge", "longest_edge")
"""The processor's names for the fewest and the most pixels."""
BANNED_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


class Qwen2VL:
    """Qwen2-VL: squares of patches are one token each, with positions by row and column."""

    image_layout: ImageLayout = "user_message"
    """Its own template has no tools, and templates that replace it mostly support only text in tool messages."""
    builtin_template: str | None = "qwen2_vl"
    vision_module = "model.visual"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.image_id: int = config["image_token_id"]
        self.banned_ids = _read_ids(config, *BANNED_IDS)
        self.frame = _read_ids(config, "vision_start_token_id"), _read_ids(config, "vision_end_token_id")
        self._merge: int = config["vision_config"]["spatial_merge_size"]

    def load_processor(self, folder: Path) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return load_image_processor(Qwen2VLImageProcessorPil, folder)

    def fit_size(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, fewest, most = processor.patch_size * self._merge, *(processor.size[name] for name in PIXEL_BOUNDS)
        size = smart_resize(height, width, factor, fewest, most)[::-1]
        return (int(size[0]), int(size[1]))

    def count_tokens(self, grid: Grid) -> int:
        time, height, width = grid
        return time * (height // self._merge) * (width // self._merge)

    def compute_positions(self, count: int, images: Sequence[tuple[int, Grid]]) -> Tensor:
        """Text advances by one on all axes; an image by its longer side."""
        parts, covered, position = [], 0, 0
        for start, (time, height, width) in images:
            parts.append(torch.arange(position, position + start - covered).expand(3, -1))
            position += start - covered
            sides = (time, height // self._merge, width // self._merge)
            axes = torch.meshgrid(*(torch.arange(side) for side in sides), indexing="ij")
            parts.append(torch.stack([axis.flatten() for axis in axes]) + position)
            position += max(sides[1:])
            covered = start + parts[-1].shape[1]
        return torch.cat([*parts, torch.arange(position, position + count - covered).expand(3, -1)], dim=1)

    def encode(self, encoder: nn.Module, pixels: Tensor, grids: Tensor) -> ImageFeatures:
        return ImageFeatures(self._run_encoder(encoder, pixels, grids).pooler_output)

    def _run_encoder(self, encoder: nn.Module, pixels: Tensor, grids: Tensor) -> Any:
        """Runs the encoder with what it makes of the sizes: it would read them from the device for that."""
        made = {"grid_thw": grids, **self._prepare_sizes(encoder, grids)}
        # Lengths of sequences stay in the host's memory, where attention splits its inputs by them.
        for name in made.keys() - {"cu_seqlens", "cu_window_seqlens"}:
            made[name] = made[name].to(pixels.device, non_blocking=True)
        return encoder(pixels, **made)

    def _prepare_sizes(self, encoder: Any, grids: Tensor) -> dict[str, Tensor]:
        """What the encoder makes of the images' sizes."""
        positions = get_vision_position_ids(grids, self._merge)
        return {"position_ids": positions, "cu_seqlens": get_vision_cu_seqlens(grids)}


def _read_ids(config: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(int(config[name]) for name in names if config.get(name) is not None)


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: the same interface; its own template writes images into any message, including tools'."""

    image_layout = "in_tool_message"

    def _prepare_sizes(self, encoder: Any, grids: Tensor) -> dict[str, Tensor]:
        index, lengths = get_vision_window_index(grids, self._merge, encoder.window_size, encoder.patch_size)
        return {**super()._prepare_sizes(encoder, grids), "window_index": index, "cu_window_seqlens": lengths}


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: adds DeepStack features after the first layers."""

    image_layout = "in_tool_message"
    builtin_template = None

    def encode(self, encoder: nn.Module, pixels: Tensor, grids: Tensor) -> ImageFeatures:
        output = self._run_encoder(encoder, pixels, grids)
        return ImageFeatures(output.pooler_output, tuple(output.deepstack_features))

    def _prepare_sizes(self, encoder: Any, grids: Tensor) -> dict[str, Tensor]:
        mode, corners = encoder.interpolation_mode, encoder.interpolation_align_corners
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids, encoder.num_grid_per_side, mode, corners, self._merge
        )
        return {**super()._prepare_sizes(encoder, grids), "interp_indices": indices, "interp_weights": weights}

"""Qwen3-VL: what its eyes saw on the way is added after its first layers as well."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.vision.family import Seen
from trainer.vision.qwen2_vl import Qwen2VL


class Qwen3VL(Qwen2VL):
    layout = "in_tool_message"
    chat = None

    def see(self, eyes: nn.Module, pixels: Tensor, grids: Tensor) -> Seen:
        seen = eyes(pixels, grid_thw=grids)
        return Seen(seen.pooler_output, tuple(seen.deepstack_features))

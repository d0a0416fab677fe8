"""The interface of a vision-language model family: its placeholder ids, image sizes, positions and encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from trainer.pretrained import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

ImageLayout = Literal["in_tool_message", "user_message"]
"""Where images of a tool's answer go: into the tool's message, or into a user message after it."""
Grid = tuple[int, int, int]
"""Patches of an image: in time, vertically, horizontally."""


class ImageFeatures(NamedTuple):
    """The vision encoder's output for images, one row for each placeholder token."""

    features_FD: Tensor
    deepstack: tuple[Tensor, ...] = ()
    """For families with DeepStack, what is added after each of the first layers; the same rows."""


class VisionFamily(Protocol):
    """What the template, the engines and the trainer need to know about a family."""

    image_id: int
    """The placeholder id of an image, repeated to the image's token count in the model."""
    frame: tuple[tuple[int, ...], tuple[int, ...]]
    """The ids before and after an image, if any."""
    banned_ids: tuple[int, ...]
    """Ids that a policy must not sample, since it has no image to insert."""
    image_layout: ImageLayout
    """What the family's own chat template supports."""
    builtin_template: str | None
    """The name of a chat template in this package, for a family whose own writes no calls."""
    vision_module: str
    """The name of the vision encoder in the model."""

    def load_processor(self, folder: Path) -> Any:
        """The image processor of transformers, in its PIL version."""
        ...

    def fit_size(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """The size to which its processor would resize an image. Raises ValueError."""
        ...

    def count_tokens(self, grid: Grid) -> int:
        """The number of placeholder tokens of an image."""
        ...

    def compute_positions(self, count: int, images: Sequence[tuple[int, Grid]]) -> Tensor:
        """The positions of `count` ids on three axes; `images` are in order, each with its first index."""
        ...

    def encode(self, encoder: nn.Module, pixels: Tensor, grids: Tensor) -> ImageFeatures:
        """Runs the vision encoder; `grids` are in the host's memory."""
        ...


FAMILIES: Mapping[str, str] = {
    "qwen2_vl": "trainer.vision.qwen_vl:Qwen2VL",
    "qwen2_5_vl": "trainer.vision.qwen_vl:Qwen25VL",
    "qwen3_vl": "trainer.vision.qwen_vl:Qwen3VL",
}
"""By a configuration's `model_type`."""


def family_from_config(config: Mapping[str, Any]) -> VisionFamily | None:
    """The family of a model's configuration; None for a text model, or one that is not supported."""
    path = FAMILIES.get(str(config.get("model_type")))
    if path is None:
        return None
    module, _, class_name = path.partition(":")
    family: VisionFamily = getattr(import_module(module), class_name)(config)
    return family


def load_family(folder: Path) -> VisionFamily | None:
    """The family of the model in a folder."""
    return family_from_config(read_json(folder / "config.json"))

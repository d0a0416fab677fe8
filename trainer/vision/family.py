"""A family of models that see is one file: which ids stand for a picture, where they stand, what is seen there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

Layout = Literal["in_tool_message", "user_message"]
"""Where a picture stands that a tool answered with: in the tool's message, or in a user's behind it."""
Grid = tuple[int, int, int]
"""Patches of a picture: in time, from top to bottom, from left to right."""


class Seen(NamedTuple):
    """What the model's eyes make of pictures, a row for each id that stands for them."""

    rows_FD: Tensor
    deep: tuple[Tensor, ...] = ()
    """Where the family does so, what is added after each of the first layers; rows as above."""


class Family(Protocol):
    image: int
    """The id that stands for a picture; as often as it is wide, where the model sees it."""
    frame: tuple[tuple[int, ...], tuple[int, ...]]
    """What stands before and behind a picture, where anything does."""
    barred: tuple[int, ...]
    """What no policy may write, since it has no picture to give."""
    layout: Layout
    """What the family's own chat template can do."""
    chat: str | None
    """A chat template that comes with the package, where the family's own writes no calls."""
    eyes: str
    """The model's part that sees, by its name in the model."""
    words: str
    """And its part that reads."""

    def processor(self, folder: Path) -> Any:
        """The image processor of transformers, on PIL alone."""
        ...

    def sides(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """To which its processor brings a picture; itself, of one that it takes as it is. Raises ValueError."""
        ...

    def width(self, grid: Grid) -> int:
        """Ids that stand for a picture."""
        ...

    def places(self, count: int, pictures: Sequence[tuple[int, Grid]]) -> Tensor:
        """Of each of `count` ids, its place on three axes. Pictures stand in order, each where it begins."""
        ...

    def see(self, eyes: nn.Module, pixels: Tensor, grids: Tensor) -> Seen: ...


NAMES: Mapping[str, str] = {
    "qwen2_vl": "trainer.vision.qwen2_vl:Qwen2VL",
    "qwen2_5_vl": "trainer.vision.qwen2_5_vl:Qwen25VL",
    "qwen3_vl": "trainer.vision.qwen3_vl:Qwen3VL",
}
"""By a configuration's `model_type`."""


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Of a model's configuration; None where it sees nothing, or nobody has said how."""
    name = NAMES.get(str(config.get("model_type")))
    if name is None:
        return None
    module, _, kind = name.partition(":")
    made: Family = getattr(import_module(module), kind)(config)
    return made


def family_in(folder: Path) -> Family | None:
    """Of the model in a folder."""
    try:
        told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return family_of(told) if isinstance(told, Mapping) else None

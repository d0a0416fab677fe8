"""Houses: of four windows one is lit, and the room behind it has a colour. A house is all in its name."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from PIL import Image, ImageDraw

Show = Literal["house", "nothing", "neighbour"]
"""What the tools show of a house: itself, or, as controls, a grey picture, or the house that it changes places with."""
SIDE = 16
"""Pixels: so small a picture is four places to a model whose patches are four wide, two by two of them one place."""
WINDOWS: Mapping[str, tuple[int, int]] = {
    "upper left": (0, 0),
    "upper right": (8, 0),
    "lower left": (0, 8),
    "lower right": (8, 8),
}
"""Where each begins."""
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (205, 35, 35),
    "green": (40, 160, 50),
    "blue": (40, 70, 205),
    "yellow": (235, 215, 50),
    "purple": (140, 45, 165),
    "orange": (245, 135, 25),
    "white": (240, 240, 240),
    "black": (15, 15, 15),
}
DARK, LIT, GREY = (45, 45, 60), (255, 240, 150), (128, 128, 128)
WALLS = ((150, 110, 90), (170, 160, 140), (110, 120, 130), (190, 150, 110))


@dataclass(frozen=True, slots=True)
class House:
    wall: tuple[int, int, int]
    lit: str
    """The window."""
    rooms: Mapping[str, str]
    """The colour behind each window."""

    @classmethod
    def named(cls, name: str) -> House:
        """The same for the same name, whoever asks."""
        draw = Random(f"house/{name}")  # noqa: S311 - no secret
        rooms = {window: draw.choice(tuple(COLOURS)) for window in WINDOWS}
        return cls(draw.choice(WALLS), draw.choice(tuple(WINDOWS)), rooms)

    @property
    def answer(self) -> str:
        return self.rooms[self.lit]


def neighbour(name: str) -> str:
    """Of two houses each is the other's: the last digit's partner."""
    return name[:-1] + str(int(name[-1]) ^ 1) if name[-1:].isdigit() else name


def outside(name: str, show: Show = "house") -> bytes:
    """A PNG of the whole house: which window is lit can be told, what is behind it cannot."""
    house = _shown(name, show)
    picture = Image.new("RGB", (SIDE, SIDE), house.wall if house else GREY)
    if house:
        pen = ImageDraw.Draw(picture)
        for window, (left, top) in WINDOWS.items():
            pen.rectangle((left + 1, top + 1, left + 6, top + 6), LIT if window == house.lit else DARK)
    return _png(picture)


def inside(name: str, window: str, show: Show = "house") -> bytes:
    """A PNG of what is behind a window. Raises ValueError where there is no such window."""
    if window not in WINDOWS:
        raise ValueError(f"there is no window {window!r}; there are {', '.join(WINDOWS)}")
    house = _shown(name, show)
    picture = Image.new("RGB", (SIDE, SIDE), house.wall if house else GREY)
    if house:
        ImageDraw.Draw(picture).rectangle((2, 2, SIDE - 3, SIDE - 3), COLOURS[house.rooms[window]])
    return _png(picture)


def _shown(name: str, show: Show) -> House | None:
    if show == "nothing":
        return None
    return House.named(neighbour(name) if show == "neighbour" else name)


def _png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return out.getvalue()

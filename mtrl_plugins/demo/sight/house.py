"""Draws the houses of the vision demo: one of four windows is lit, and its room has a colour. The name decides all."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from PIL import Image, ImageDraw

Show = Literal["house", "nothing", "neighbour"]
"""What the tools show: the house, or as a control experiment a grey image, or the neighbouring house."""
SIDE = 16
"""Image side in pixels. With patches of 4 pixels, merged two by two, an image is four tokens."""
WINDOWS: Mapping[str, tuple[int, int]] = {
    "upper left": (0, 0),
    "upper right": (8, 0),
    "lower left": (0, 8),
    "lower right": (8, 8),
}
"""The top left corner of each window."""
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
    """A house, determined by its name."""

    wall: tuple[int, int, int]
    lit: str
    """The lit window."""
    rooms: Mapping[str, str]
    """The colour of the room behind each window."""

    @classmethod
    def from_name(cls, name: str) -> House:
        draw = Random(f"house/{name}")  # noqa: S311 - not security-relevant
        rooms = {window: draw.choice(tuple(COLOURS)) for window in WINDOWS}
        return cls(draw.choice(WALLS), draw.choice(tuple(WINDOWS)), rooms)

    @property
    def answer(self) -> str:
        return self.rooms[self.lit]


def neighbour_of(name: str) -> str:
    """The name of the neighbouring house: houses are paired by their last digit."""
    return name[:-1] + str(int(name[-1]) ^ 1) if name[-1:].isdigit() else name


def draw_outside(name: str, show: Show = "house") -> bytes:
    """A PNG of the house: shows which window is lit, but not the colour of its room."""
    house = _house_to_show(name, show)
    image = Image.new("RGB", (SIDE, SIDE), house.wall if house else GREY)
    if house:
        pen = ImageDraw.Draw(image)
        for window, (left, top) in WINDOWS.items():
            pen.rectangle((left + 1, top + 1, left + 6, top + 6), LIT if window == house.lit else DARK)
    return _encode_png(image)


def draw_inside(name: str, window: str, show: Show = "house") -> bytes:
    """A PNG of the room behind a window. Raises ValueError if there is no such window."""
    if window not in WINDOWS:
        raise ValueError(f"there is no window {window!r}; there are {', '.join(WINDOWS)}")
    house = _house_to_show(name, show)
    image = Image.new("RGB", (SIDE, SIDE), house.wall if house else GREY)
    if house:
        ImageDraw.Draw(image).rectangle((2, 2, SIDE - 3, SIDE - 3), COLOURS[house.rooms[window]])
    return _encode_png(image)


def _house_to_show(name: str, show: Show) -> House | None:
    if show == "nothing":
        return None
    return House.from_name(neighbour_of(name) if show == "neighbour" else name)


def _encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()

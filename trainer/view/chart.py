"""Numbers over steps in a few characters: a line of blocks, or a curve of braille dots with its names at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, log

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a braille character's four rows, the bits of the left and the right dot."""
BRAILLE = 0x2800
COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")
QUIET = "dim"


class Trend:
    """A number over any many steps, in no more than `2 * width` means of as many steps each."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._means: list[float] = []
        self._each = 1
        """Steps in a mean."""
        self._open: list[float] = []

    def add(self, value: float) -> None:
        if not isfinite(value):
            return
        self._open.append(value)
        if len(self._open) == self._each:
            self._means.append(sum(self._open) / self._each)
            self._open = []
        if len(self._means) == 2 * self._width:
            self._means = [(one + other) / 2 for one, other in zip(self._means[::2], self._means[1::2], strict=True)]
            self._each *= 2

    def __str__(self) -> str:
        """The lowest and the highest block are the lowest and the highest mean."""
        means = [*self._means, *([sum(self._open) / len(self._open)] if self._open else [])]
        while len(means) > self._width:
            means = [sum(means[place : place + 2]) / len(means[place : place + 2]) for place in range(0, len(means), 2)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        height = (high - low) or 1.0
        return "".join(BLOCKS[min(7, int((mean - low) / height * 8))] for mean in means)


@dataclass(frozen=True, slots=True)
class Curve:
    """A number by step; where it is `sparse`, its points count and not the way between them."""

    name: str
    points: tuple[tuple[float, float], ...]
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Which part of the plane is shown, and in how many characters."""

    left: float
    right: float
    low: float
    high: float
    width: int
    height: int
    log: bool = False

    @classmethod
    def of(cls, curves: Sequence[Curve], width: int, height: int, scale: str) -> Frame:
        steps = [step for curve in curves for step, _ in curve.points]
        values = [value for curve in curves for _, value in curve.points]
        low, high = (0.0, 1.0) if scale == "share" else (min(values), max(values))
        return cls(min(steps), max(steps), low, high, width, height, scale == "log")

    def dot(self, point: tuple[float, float]) -> tuple[int, int]:
        """Column and row of the dot, the first row on top."""
        low, value, high = (log(one) if self.log else one for one in (self.low, point[1], self.high))
        across = (point[0] - self.left) / ((self.right - self.left) or 1.0)
        up = (value - low) / ((high - low) or 1.0)
        return round(across * (self.width * 2 - 1)), round((1 - up) * (self.height * 4 - 1))


def drawn(title: Text, curves: Sequence[Curve], width: int, height: int, *, scale: str = "linear") -> Text:
    """A chart in so many characters, its curves' names and last values beside their ends."""
    names = [f" {curve.name} {number(curve.points[-1][1])}" for curve in curves]
    frame = Frame.of(curves, 0, height, scale)
    marks = {0: number(frame.high), height - 1: number(frame.low)}
    margin = max(map(len, marks.values()))
    frame = replace(frame, width=max(8, width - margin - 1 - max(map(len, names))))
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    labels: dict[int, tuple[str, str]] = {}
    for place, (curve, name) in enumerate(zip(curves, names, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        _draw(cells, curve, frame, colour)
        end = frame.dot(curve.points[-1])[1] // 4
        free = min((row for row in range(height) if row not in labels), key=lambda row: abs(row - end), default=None)
        if free is not None:
            labels[free] = name, colour
    text = Text(" " * (margin + 1)).append_text(title).append("\n")
    for row in range(height):
        text.append(f"{marks.get(row, ''):>{margin}}│", QUIET)
        for column in range(frame.width):
            bits, colour = cells.get((column, row), (0, ""))
            text.append(chr(BRAILLE + bits) if bits else " ", colour)
        text.append(*labels.get(row, ("", ""))).append("\n")
    return text.append(_axis(frame, margin), QUIET)


def _axis(frame: Frame, margin: int) -> str:
    first, last = f"step {frame.left:.0f}", f"{frame.right:.0f}"
    return f"{' ' * margin}└{'─' * frame.width}\n{' ' * (margin + 1)}{first}{last:>{max(1, frame.width - len(first))}}"


def _draw(cells: dict[tuple[int, int], tuple[int, str]], curve: Curve, frame: Frame, colour: str) -> None:
    dots = [frame.dot(point) for point in curve.points]
    lit = set(dots)
    if curve.sparse:
        lit |= {(x + right, y + down) for x, y in dots for right, down in ((1, 0), (0, 1), (1, 1))}
    else:
        lit |= {dot for start, stop in pairwise(dots) for dot in _between(start, stop)}
    for x, y in lit:
        if x < frame.width * 2 and y < frame.height * 4:
            cell = x // 2, y // 4
            cells[cell] = cells.get(cell, (0, ""))[0] | DOTS[y % 4][x % 2], colour


def _between(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    (x, y), (across, down) = start, (stop[0] - start[0], stop[1] - start[1])
    count = max(abs(across), abs(down), 1)
    return [(x + round(across * part / count), y + round(down * part / count)) for part in range(count + 1)]


def number(value: float) -> str:
    """Three digits say enough."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"

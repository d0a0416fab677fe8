"""Draws numbers over steps in a terminal: sparklines of blocks, and charts of braille dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, log

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of the left and right dot in each of a braille character's four rows."""
BRAILLE = 0x2800
COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")
QUIET = "dim"


class Trend:
    """A sparkline over any number of steps, stored as at most `2 * width` means of equally many steps."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._means: list[float] = []
        self._steps_per_mean = 1
        """Steps in a mean."""
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        if not isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._steps_per_mean:
            self._means.append(sum(self._pending) / self._steps_per_mean)
            self._pending = []
        if len(self._means) == 2 * self._width:
            self._means = [
                (first + second) / 2 for first, second in zip(self._means[::2], self._means[1::2], strict=True)
            ]
            self._steps_per_mean *= 2

    def __str__(self) -> str:
        """The means as blocks, scaled from the lowest to the highest."""
        means = [*self._means, *([sum(self._pending) / len(self._pending)] if self._pending else [])]
        while len(means) > self._width:
            means = [sum(means[index : index + 2]) / len(means[index : index + 2]) for index in range(0, len(means), 2)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        height = (high - low) or 1.0
        return "".join(BLOCKS[min(7, int((mean - low) / height * 8))] for mean in means)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric by step; a `sparse` one is drawn as points instead of a line."""

    name: str
    points: tuple[tuple[float, float], ...]
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The visible ranges of steps and values, and the size in characters."""

    left: float
    right: float
    low: float
    high: float
    width: int
    height: int
    log: bool = False

    @classmethod
    def fit(cls, curves: Sequence[Curve], width: int, height: int, scale: str) -> Frame:
        steps = [step for curve in curves for step, _ in curve.points]
        values = [value for curve in curves for _, value in curve.points]
        low, high = (0.0, 1.0) if scale == "share" else (min(values), max(values))
        return cls(min(steps), max(steps), low, high, width, height, scale == "log")

    def dot(self, point: tuple[float, float]) -> tuple[int, int]:
        """The column and row of a point's dot, from the top left."""
        low, value, high = (log(number) if self.log else number for number in (self.low, point[1], self.high))
        across = (point[0] - self.left) / ((self.right - self.left) or 1.0)
        up = (value - low) / ((high - low) or 1.0)
        return round(across * (self.width * 2 - 1)), round((1 - up) * (self.height * 4 - 1))


def draw_chart(title: Text, curves: Sequence[Curve], width: int, height: int, *, scale: str = "linear") -> Text:
    """A chart of the given size in characters, with each curve's name and last value at its end."""
    names = [f" {curve.name} {format_number(curve.points[-1][1])}" for curve in curves]
    frame = Frame.fit(curves, 0, height, scale)
    marks = {0: format_number(frame.high), height - 1: format_number(frame.low)}
    margin = max(map(len, marks.values()))
    frame = replace(frame, width=max(7, width - margin - 1 - max(map(len, names))))
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    labels: dict[int, tuple[str, str]] = {}
    for index, (curve, name) in enumerate(zip(curves, names, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        _draw_curve(cells, curve, frame, colour)
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
    return text.append(_format_axis(frame, margin), QUIET)


def _format_axis(frame: Frame, margin: int) -> str:
    first, last = f"step {frame.left:.0f}", f"{frame.right:.0f}"
    return f"{' ' * margin}└{'─' * frame.width}\n{' ' * (margin + 1)}{first}{last:>{max(1, frame.width - len(first))}}"


def _draw_curve(cells: dict[tuple[int, int], tuple[int, str]], curve: Curve, frame: Frame, colour: str) -> None:
    dots = [frame.dot(point) for point in curve.points]
    lit = set(dots)
    if curve.sparse:
        lit |= {(x + right, y + down) for x, y in dots for right, down in ((1, 0), (0, 1), (1, 1))}
    else:
        lit |= {dot for start, stop in pairwise(dots) for dot in _line_dots(start, stop)}
    for x, y in lit:
        if x < frame.width * 2 and y < frame.height * 4:
            cell = x // 2, y // 4
            cells[cell] = cells.get(cell, (0, ""))[0] | DOTS[y % 4][x % 2], colour


def _line_dots(start: tuple[int, int], stop: tuple[int, int]) -> list[tuple[int, int]]:
    (x, y), (across, down) = start, (stop[0] - start[0], stop[1] - start[1])
    count = max(abs(across), abs(down), 1)
    return [(x + round(across * part / count), y + round(down * part / count)) for part in range(count + 1)]


def format_number(value: float) -> str:
    """The value with three digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"

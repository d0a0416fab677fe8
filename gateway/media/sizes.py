"""A vision model sees patches: sides are multiples of a factor, and their product lies within bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

from gateway.media.kind import MediaError

MOST_ASPECT = 200
"""A picture that is longer than this many times its width is refused, as the models' own processors do."""


class Bounds(NamedTuple):
    """Pixels of one picture, and the factor of its sides."""

    min_pixels: int
    max_pixels: int
    factor: int


def fitted(width: int, height: int, bounds: Bounds) -> tuple[int, int]:
    """The sides nearest to these that are multiples of the factor and lie within the bounds, in the same aspect."""
    factor = bounds.factor
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise MediaError(f"{width}x{height} pixels: one side is more than {MOST_ASPECT} times the other")
    wide, high = _in_aspect(rounded(width, factor), rounded(height, factor))
    if wide * high > bounds.max_pixels:
        shrink = math.sqrt(width * height / bounds.max_pixels)
        wide, high = _in_aspect(*(max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)))
    elif wide * high < bounds.min_pixels:
        grow = math.sqrt(bounds.min_pixels / (width * height))
        wide, high = (math.ceil(side * grow / factor) * factor for side in (width, height))
    return wide, high


def _in_aspect(wide: int, high: int) -> tuple[int, int]:
    """Rounding may have made the short side too short for the long one."""
    return min(wide, MOST_ASPECT * high), min(high, MOST_ASPECT * wide)


def rounded(side: int, factor: int) -> int:
    """The nearest multiple that is not nothing."""
    return max(factor, round(side / factor) * factor)

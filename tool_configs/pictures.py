"""A tool that returns an image: a bar chart."""

from __future__ import annotations

from typing import Annotated, Any

from PIL import Image, ImageDraw
from pydantic import Field

WIDTH, HEIGHT, MARGIN = 320, 200, 20
COLOURS = ("#4063d8", "#389826", "#cb3c33", "#9558b2")


def draw_bars(
    values: Annotated[list[float], Field(min_length=1, max_length=32)],
    labels: list[str] | None = None,
) -> list[Any]:
    """Draws a bar chart and returns it as a picture.

    Args:
        values: the height of each bar, none below zero
        labels: a short word under each bar
    """
    if min(values) < 0:
        raise ValueError("a bar cannot be lower than zero")
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    step = (WIDTH - 2 * MARGIN) / len(values)
    unit = (HEIGHT - 2 * MARGIN) / (max(values) or 1)
    for index, value in enumerate(values):
        left = MARGIN + index * step
        top = HEIGHT - MARGIN - value * unit
        pen.rectangle((left, top, left + step * 0.8, HEIGHT - MARGIN), fill=COLOURS[index % len(COLOURS)])
        if labels and index < len(labels):
            pen.text((left, HEIGHT - MARGIN + 4), labels[index][:8], fill="black")
    pen.line((MARGIN, HEIGHT - MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN), fill="black")
    return [f"A chart of {len(values)} bars, the highest {max(values):g}.", image]

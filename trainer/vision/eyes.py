"""A picture is made ready for the model once, by its content: every turn, sibling and gradient sees the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from gateway.media import MediaError
from gateway.media.picture import Picture as Pixels
from gateway.media.picture import opaque, opened, resized
from gateway.types import Image
from trainer.vision.family import Family, Grid, family_in

if TYPE_CHECKING:
    from torch import Tensor

SIZES = 8
"""That a processor may bring one after the other to the next; with narrow bounds it goes on without end."""
KEPT = 2**29
"""Bytes of pixels that are kept at hand."""


class SightError(Exception):
    """A picture that cannot be seen, or pictures and ids that do not belong together."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """As a model's eyes take it."""

    digest: str
    pixels: Tensor
    """Axes: patch, value."""
    grid: Grid
    width: int
    """Ids that stand for it."""

    @property
    def name(self) -> int:
        """As an id that no vocabulary has: equal pictures, and no others, have the same."""
        return -1 - int(self.digest, 16)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Ids with pictures among them, as a model runs them."""

    ids: tuple[int, ...]
    """Each picture's name, then as many of the id that stands for pictures as it takes."""
    pictures: tuple[tuple[int, Picture], ...]
    """Each where it begins."""
    places_3N: Tensor

    @property
    def ahead(self) -> int:
        """Of an id written later, its place on each axis less its number in the row."""
        return int(self.places_3N.max()) + 1 - len(self.ids)


def seen(image: Image) -> Pixels:
    """As it is, whatever its file is like. Raises MediaError for what is no picture."""
    return opaque(opened(image.data))


class Eyes:
    """Of one model. Any thread may look."""

    def __init__(self, family: Family, processor: Any, kept: int = KEPT) -> None:
        self.family = family
        self.processed = 0
        """Pictures that were made ready, those included that had been forgotten."""
        self._processor, self._most = processor, kept
        self._known: OrderedDict[str, Picture] = OrderedDict()
        self._held = 0
        self._lock = Lock()

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Of the model in a folder; None where it has none."""
        family = family_in(folder)
        if family is None:
            return None
        try:
            return cls(family, family.processor(folder))
        except Exception as error:  # boundary: whatever a broken file makes the loader raise
            raise SightError(f"{folder}: no image processor ({error}); copy preprocessor_config.json there") from error

    def shown(self, image: Image) -> Pixels:
        """At a size that this model takes, by whatever engine: a processor that had to change it would have pixels
        of its own; where there is such a size. Raises SightError as `look` does."""
        try:
            picture = seen(image)
            return resized(picture, self._sides(picture.size))
        except MediaError as error:
            raise SightError(str(error)) from error
        except ValueError as error:  # as for a picture that is hundreds of times as long as it is wide
            raise SightError(f"the model cannot be shown it: {error}") from error

    def look(self, image: Image) -> Picture:
        """Raises SightError for what is no picture, or is too large to be looked at."""
        digest = image.digest
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
            picture = self._made(image, digest)
            self._known[digest] = picture
            self._held += picture.pixels.nbytes
            while self._held > self._most and len(self._known) > 1:
                self._held -= self._known.popitem(last=False)[1].pixels.nbytes
            return picture

    def sight(self, ids: Sequence[int], images: Sequence[Image]) -> Sight:
        """`ids` have one place for each of the images, in order."""
        at = [place for place, token in enumerate(ids) if token == self.family.image]
        if len(at) != len(images):
            raise SightError(f"{len(images)} images for ids with {len(at)} places")
        wide: list[int] = []
        pictures, done = [], 0
        for place, image in zip(at, images, strict=True):
            picture = self.look(image)
            wide += ids[done:place]
            pictures.append((len(wide), picture))
            wide += [picture.name, *[self.family.image] * (picture.width - 1)]
            done = place + 1
        wide += ids[done:]
        grids = [(start, picture.grid) for start, picture in pictures]
        return Sight(tuple(wide), tuple(pictures), self.family.places(len(wide), grids))

    def _sides(self, given: tuple[int, int]) -> tuple[int, int]:
        """As they are, where its processor would not leave them whatever they were: it takes what comes, then."""
        sides = self.family.sides(self._processor, *given)
        with suppress(ValueError):
            for _ in range(SIZES):
                before, sides = sides, self.family.sides(self._processor, *sides)
                if sides == before:
                    return sides
        return given

    def _made(self, image: Image, digest: str) -> Picture:
        made = self._processor.preprocess(images=[self.shown(image)], return_tensors="pt")
        self.processed += 1
        time, height, width = (int(side) for side in made["image_grid_thw"][0])
        grid = (time, height, width)
        return Picture(digest, made["pixel_values"], grid, self.family.width(grid))

"""Prepares images for a model, once for each content, so that all turns, siblings and gradients see the same pixels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from gateway.media import MediaError
from gateway.media.image import PILImage, open_image, resize_image, to_rgb
from gateway.types import Image
from trainer.vision.family import Grid, VisionFamily, load_family

if TYPE_CHECKING:
    from torch import Tensor

MAX_RESIZES = 8
"""How often a size is resized in search of a stable one; with narrow bounds there may be none."""
CACHE_BYTES = 2**29
"""Size of the cache of pixels."""


class VisionError(Exception):
    """An image that the model cannot take, or images that do not match their placeholders."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """An image as the vision encoder takes it."""

    digest: str
    pixels: Tensor
    """Axes: patch, value."""
    grid: Grid
    token_count: int
    """The number of placeholder tokens."""

    @property
    def placeholder_id(self) -> int:
        """A negative id that identifies the content: equal images have the same, so prefix caching works."""
        return -1 - int(self.digest, 16)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPrompt:
    """A prompt with images as a model runs it."""

    ids: tuple[int, ...]
    """For each image its `placeholder_id`, then the family's `image_id` for its other tokens."""
    images: tuple[tuple[int, PreparedImage], ...]
    """Each with the index of its first token."""
    positions_3N: Tensor

    @property
    def position_offset(self) -> int:
        """The difference between the position of a sampled id and its index."""
        return int(self.positions_3N.max()) + 1 - len(self.ids)


def decode_image(image: Image) -> PILImage:
    """Decodes an image of any format into RGB. Raises MediaError."""
    return to_rgb(open_image(image.data))


class ImageProcessor:
    """The image processor of one model, with a cache. Thread-safe."""

    def __init__(self, family: VisionFamily, processor: Any, cache_bytes: int = CACHE_BYTES) -> None:
        self.family = family
        self._processor, self._cache_bytes = processor, cache_bytes
        self._cache: OrderedDict[str, PreparedImage] = OrderedDict()
        self._cached_bytes = 0
        self._lock = Lock()

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The image processor of the model in a folder; None for a text model."""
        family = load_family(folder)
        if family is None:
            return None
        try:
            return cls(family, family.load_processor(folder))
        except Exception as error:  # boundary: the loader may raise anything for a broken file
            raise VisionError(f"{folder}: no image processor ({error}); copy preprocessor_config.json there") from error

    def fit_image(self, image: Image) -> PILImage:
        """The image at a size that the model's processor leaves unchanged, if there is one, so that every engine sees
        the same pixels. Raises VisionError."""
        try:
            decoded = decode_image(image)
            return resize_image(decoded, self._stable_size(decoded.size))
        except MediaError as error:
            raise VisionError(str(error)) from error
        except ValueError as error:  # For example, an image that is hundreds of times as long as it is wide.
            raise VisionError(f"the model cannot be shown it: {error}") from error

    def prepare(self, image: Image) -> PreparedImage:
        """The prepared image. Raises VisionError for invalid or too large images."""
        digest = image.digest
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
            prepared = self._process(image, digest)
            self._cache[digest] = prepared
            self._cached_bytes += prepared.pixels.nbytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].pixels.nbytes
            return prepared

    def prepare_prompt(self, ids: Sequence[int], images: Sequence[Image]) -> PreparedPrompt:
        """Expands ids that have one placeholder for each of the images, in order."""
        placeholders = [index for index, token in enumerate(ids) if token == self.family.image_id]
        if len(placeholders) != len(images):
            raise VisionError(f"{len(images)} images for ids with {len(placeholders)} placeholders")
        expanded: list[int] = []
        prepared, copied = [], 0
        for index, image in zip(placeholders, images, strict=True):
            prepared_image = self.prepare(image)
            expanded += ids[copied:index]
            prepared.append((len(expanded), prepared_image))
            repeats = prepared_image.token_count - 1
            expanded += [prepared_image.placeholder_id, *[self.family.image_id] * repeats]
            copied = index + 1
        expanded += ids[copied:]
        grids = [(start, prepared_image.grid) for start, prepared_image in prepared]
        positions_3N = self.family.compute_positions(len(expanded), grids)
        return PreparedPrompt(tuple(expanded), tuple(prepared), positions_3N)

    def _stable_size(self, original: tuple[int, int]) -> tuple[int, int]:
        """A size that the processor leaves unchanged; the original one if resizing does not converge."""
        size = self.family.fit_size(self._processor, *original)
        with suppress(ValueError):
            for _ in range(MAX_RESIZES):
                previous, size = size, self.family.fit_size(self._processor, *size)
                if size == previous:
                    return size
        return original

    def _process(self, image: Image, digest: str) -> PreparedImage:
        output = self._processor.preprocess(images=[self.fit_image(image)], return_tensors="pt")
        time, height, width = (int(side) for side in output["image_grid_thw"][0])
        grid = (time, height, width)
        return PreparedImage(digest, output["pixel_values"], grid, self.family.count_tokens(grid))

"""A server opens files in its own way: it is sent those that can be opened in one way alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread

from gateway.media import MediaError
from gateway.media.picture import Picture, encoded
from gateway.types import Image
from trainer.engine.base import EngineError
from trainer.template.known import Known
from trainer.vision.eyes import SightError, seen

KEPT = 2**28
"""Bytes of files that are kept at hand: a picture is sent with every turn that comes after it."""
Shown = Callable[[Image], Picture]


class Prints:
    """Pictures as PNG, with the pixels that the trainer's eyes are shown; each is made once, by its content."""

    def __init__(self, shown: Shown = seen) -> None:
        self._shown = shown
        self._known: Known[str, bytes] = Known(KEPT)
        self._making: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        """By content: siblings ask for the same one at once."""

    async def of(self, images: Sequence[Image]) -> tuple[Image, ...]:
        return tuple([await self._print(image) for image in images])

    async def _print(self, image: Image) -> Image:
        digest = image.digest
        async with self._making.setdefault(digest, anyio.Lock()):
            return Image(await to_thread.run_sync(self._known.of, digest, partial(self._data, image)))

    def _data(self, image: Image) -> bytes:
        try:
            picture = self._shown(image)
            # One that was changed on the way is of no format any more.
            return image.data if picture.format == "PNG" else encoded(picture).data
        except (MediaError, SightError) as error:
            raise EngineError(f"SGLang cannot be shown a picture: {error}") from error

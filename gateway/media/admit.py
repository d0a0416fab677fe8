"""A policy is shown what is sound, small enough and asked for; of all else it reads that it was left out, and why.

A medium is measured by its header, then decoded once to know that it is whole, and held once for as long as anybody
holds it: a picture that a hundred rollouts are shown is checked once, and lies once in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from gateway.config.models import MediaLimits
from gateway.media.film import SHOWN, Sampling, Seen, frames
from gateway.media.header import size
from gateway.media.kind import MediaError, as_film, raster, sniff
from gateway.media.picture import (
    Picture,
    decoded,
    encoded,
    encoded_film,
    measured,
    moves,
    opaque,
    opened,
    resized,
)
from gateway.media.sizes import Bounds, fitted
from gateway.media.take import note
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, Video

AT_ONCE = 4
"""Results whose media are decoded at the same time: each may take a quarter of a gigabyte."""
LIGHT_BYTES = 64 * 1024
LIGHT_PIXELS = 512 * 512
"""Results with less than this are looked at here; a thread would cost more."""
LOST = "media_refused"
"""Among a result's metrics, how many of its media the policy is not shown."""
Medium = Image | Audio | Video


class Store:
    """Media by their content, for as long as they are in use."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Hashable, Medium] = WeakValueDictionary()
        self.places = CapacityLimiter(AT_ONCE)

    def once(self, key: Hashable, make: Callable[[], Medium]) -> Medium:
        """What was made under this key before, or what is made now."""
        medium = self._held.get(key)
        if medium is None:
            medium = self._held.setdefault(key, make())
        return medium

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)


class Admitted(NamedTuple):
    parts: tuple[Part, ...]
    lost: int


class Admission:
    """The limits of one tool or interaction."""

    def __init__(self, limits: MediaLimits | None = None, store: Store | None = None) -> None:
        self.limits = limits or MediaLimits()
        self.store = Store() if store is None else store

    async def __call__(self, result: ToolResult) -> ToolResult:
        if all(isinstance(part, Text) for part in result.parts):
            return result
        parts, lost = await self.parts(result.parts)
        if not lost:
            return replace(result, parts=parts)
        before = result.metrics.get(LOST)  # It may be a server's word, and anything.
        lost += before if isinstance(before, int) else 0
        return replace(result, parts=parts, metrics={**result.metrics, LOST: lost})

    async def parts(self, parts: tuple[Part, ...]) -> Admitted:
        """The same object where there is nothing but text."""
        if all(isinstance(part, Text) for part in parts):
            return Admitted(parts, 0)
        if self.limits.animated != "frames" and _is_light(parts):  # A walk over frames is never light.
            return self.admitted(parts)
        return await to_thread.run_sync(self.admitted, parts, abandon_on_cancel=True, limiter=self.store.places)

    def admitted(self, parts: Iterable[Part]) -> Admitted:
        """The parts in their order, with a note in the place of each that is not shown."""
        shown: list[Part] = []
        lost = images = extra = 0
        place = 0
        for part in parts:
            for one in self._of(part):
                if isinstance(one, Image) and images == self.limits.most_images:
                    place = place if extra else len(shown)
                    extra += 1
                    continue
                images += isinstance(one, Image)
                lost += isinstance(one, _Refusal)
                shown.append(one.note if isinstance(one, _Refusal) else one)
        if extra:
            many = f"{extra} more image{'s' if extra > 1 else ''}"
            shown.insert(place, note(many, f"at most {self.limits.most_images} of one result are shown"))
        return Admitted(tuple(shown), lost + extra)

    def _of(self, part: Part) -> Iterator[Part | _Refusal]:
        if isinstance(part, Text) or part.data is None:
            yield part
            return
        try:
            yield from self._looked_at(part)
        except MediaError as error:
            yield _Refusal(note(type(part).__name__.lower(), str(error)))

    def _looked_at(self, part: Medium | Resource) -> Iterator[Part]:
        data = part.data or b""
        if len(data) > self.limits.most_bytes:
            raise MediaError(f"{len(data)} bytes, more than {self.limits.most_bytes}")
        declared = part.mime or ""
        pictured = (sniff(data) or "").startswith("image/")
        if (
            isinstance(part, Image)
            or (isinstance(part, Resource) and declared.startswith("image/"))
            or (isinstance(part, Resource | Audio) and pictured)
        ):
            yield from self._image(Image(data, raster(data)))
        elif isinstance(part, Video):
            yield from self._film(as_film(data) if pictured else Video(data, declared))
        else:
            yield part

    def _image(self, image: Image) -> Iterator[Part]:
        """As it came, unless it moves or its size is asked to be another."""
        measured(image.data, self.limits.most_pixels)
        if _still(image) in self.store:
            yield self._shown(image)
            return
        picture = opened(image.data, self.limits.most_pixels)
        if not moves(picture):
            yield self._shown(image)
        elif self.limits.animated == "film":
            yield from self._film(as_film(image.data))
        elif self.limits.animated == "frames":
            yield from self._frames(image.data)
        else:
            first = self.store.once(("first", image.digest), lambda: encoded(opaque(decoded(picture))))
            yield self._shown(_image(first))
            yield Text("[the image is animated: this is how it begins]")

    def _shown(self, image: Image) -> Image:
        """A picture that stands still, known to be whole, in a size that is asked for."""
        most_pixels = self.limits.most_pixels
        whole = self.store.once(_still(image), lambda: _whole(image, most_pixels))
        if (sides := size(image.data)) == self._sides(*sides):
            return _image(whole)

        def fit() -> Image:
            return encoded(self._resized(opaque(opened(image.data, most_pixels))))

        return _image(self.store.once(("resized", image.digest, self._bounds), fit))

    @property
    def _bounds(self) -> Bounds:
        limits = self.limits
        return Bounds(limits.min_pixels or 1, limits.max_pixels or limits.most_pixels, limits.factor)

    def _sides(self, width: int, height: int) -> tuple[int, int]:
        """The same, unless others are asked for."""
        bounds = self._bounds
        fits = bounds.min_pixels <= width * height <= bounds.max_pixels
        return (width, height) if fits else fitted(width, height, bounds)

    def _resized(self, picture: Picture) -> Picture:
        return resized(picture, self._sides(*picture.size))

    def _film(self, film: Video) -> Iterator[Part]:
        limits = self.limits
        if limits.films == "frames":
            yield from self._frames(film.data)
            return
        if (sniff(film.data) or "").startswith("image/"):
            measured(film.data, limits.most_pixels)
        if limits.min_pixels or limits.max_pixels or self._most_frames < SHOWN:
            yield self.store.once(("fitted", film.mime, film.digest, limits), lambda: self._fitted(film))
        else:
            yield self.store.once((Video, film.mime, film.digest), lambda: film)

    def _fitted(self, film: Video) -> Video:
        """A film is shown as pictures in the end, so it has no more of them, and no others, than are asked for."""
        if not self._most_frames:
            raise MediaError("at most 0 images of one result are shown")
        seen = self._seen(film.data)
        pictures = [self._resized(picture) for picture in seen.pictures]
        if seen.total <= self._most_frames and pictures[0].size == seen.pictures[0].size:
            return film
        return encoded_film(pictures, seen.fps)

    @property
    def _most_frames(self) -> int:
        return min(self.limits.max_frames, self.limits.most_images)

    def _seen(self, data: bytes) -> Seen:
        return frames(data, Sampling(self.limits.fps, 1, self._most_frames), self.limits.most_pixels)

    def _frames(self, data: bytes) -> Iterator[Part]:
        seen = self._seen(data)
        count = len(seen.pictures)
        yield Text(f"[a film of {seen.seconds:.3g} s: {count} of its {seen.total} frames, evenly spread]")
        for picture in seen.pictures:
            yield self._shown(encoded(picture))


class _Refusal(NamedTuple):
    note: Text


def _still(image: Image) -> Hashable:
    """The key of a picture that is whole and does not move."""
    return Image, image.mime, image.digest


def _whole(image: Image, most_pixels: int) -> Image:
    decoded(opened(image.data, most_pixels))
    return image


def _image(medium: Medium) -> Image:
    if not isinstance(medium, Image):
        raise TypeError(f"{medium!r} was held as a picture")
    return medium


def _is_light(parts: Iterable[Part]) -> bool:
    """Whether a look costs less than the way to a thread."""
    held = [part for part in parts if not isinstance(part, Text) and part.data is not None]
    images = [part.data for part in held if isinstance(part, Image)]
    if len(images) < len(held) or sum(map(len, images)) > LIGHT_BYTES:
        return False
    try:
        return sum(width * height for width, height in map(size, images)) < LIGHT_PIXELS
    except MediaError:
        return False

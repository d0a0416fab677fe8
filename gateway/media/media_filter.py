"""Checks the media of a result against `MediaLimits`: resizes, samples frames, replaces refused media with notes.

The size is read from the header, then the data is decoded once to know that it is not damaged. An image that a hundred
rollouts are shown is checked once and held in memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter, to_thread

from gateway.config.models import MediaLimits
from gateway.media.image import (
    PILImage,
    decode_image,
    encode_png,
    encode_video,
    is_animated,
    measure_image,
    open_image,
    resize_image,
    to_rgb,
    with_usable_profile,
)
from gateway.media.process import PixelBounds, fit_size
from gateway.media.sniff import MediaError, as_video, raster_type, read_image_size, sniff
from gateway.media.to_parts import refusal_note
from gateway.media.video import DEFAULT_SHOWN_FRAMES, FrameSampling, SampledFrames, sample_video
from gateway.plural import format_count
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, Video, are_text

MAX_CONCURRENT_DECODES = 4
"""Results whose media are decoded at the same time: each may take 256 MB."""
LIGHT_BYTES = 64 * 1024
LIGHT_PIXELS = 512 * 512
LIGHT_IMAGES = 4
"""Smaller results are checked on the event loop: a thread would cost more."""
REFUSED_METRIC = "media_refused"
"""The metric of a result that counts its refused media."""
Medium = Image | Audio | Video
M = TypeVar("M", Image, Video)


class MediaStore:
    """Checked media by content, each held for as long as it is in use."""

    def __init__(self) -> None:
        self._media: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self.decode_slots = CapacityLimiter(MAX_CONCURRENT_DECODES)

    def get_or_create(self, key: Hashable, create: Callable[[], M]) -> M:
        """The medium of a key, created if it is not held."""
        medium: M | None = self._media.get(key)
        if medium is None:
            medium = self._media.setdefault(key, create())
        return medium

    def __contains__(self, key: Hashable) -> bool:
        return key in self._media

    def __len__(self) -> int:
        return len(self._media)


class FilteredParts(NamedTuple):
    """The parts that the policy is shown, and how many media were refused."""

    parts: tuple[Part, ...]
    refused: int


class MediaFilter:
    """Applies the media limits of one tool or interaction."""

    def __init__(self, limits: MediaLimits | None = None, store: MediaStore | None = None) -> None:
        self.limits = limits or MediaLimits()
        self.store = MediaStore() if store is None else store

    async def __call__(self, result: ToolResult) -> ToolResult:
        """The result with filtered parts; the same object if it is only text."""
        if are_text(result.parts):
            return result
        parts, refused = await self.filter_parts(result.parts)
        if not refused:
            return replace(result, parts=parts)
        earlier = result.metrics.get(REFUSED_METRIC)  # A server may have reported anything under this name.
        refused += earlier if isinstance(earlier, int) else 0
        return replace(result, parts=parts, metrics={**result.metrics, REFUSED_METRIC: refused})

    async def filter_parts(self, parts: tuple[Part, ...]) -> FilteredParts:
        """Filters parts, in a thread if that takes long; returns the same tuple if it is only text."""
        if are_text(parts):
            return FilteredParts(parts, 0)
        if self.limits.animated != "frames" and _is_light(parts):  # Decoding many frames always takes long.
            return self.filter_parts_sync(parts)
        return await to_thread.run_sync(
            self.filter_parts_sync, parts, abandon_on_cancel=True, limiter=self.store.decode_slots
        )

    def filter_parts_sync(self, parts: Iterable[Part]) -> FilteredParts:
        """Filters parts in order; a note replaces each refused medium, and one note all images above the limit."""
        shown: list[Part] = []
        refused = images = surplus = 0
        surplus_index = 0
        for part in parts:
            for item in self._filter_part(part):
                if isinstance(item, Image) and images == self.limits.most_images:
                    surplus_index = surplus_index if surplus else len(shown)
                    surplus += 1
                    continue
                images += isinstance(item, Image)
                refused += isinstance(item, _Refusal)
                shown.append(item.note if isinstance(item, _Refusal) else item)
        if surplus:
            kind = format_count(surplus, "more image")
            reason = f"at most {self.limits.most_images} of one result are shown"
            shown.insert(surplus_index, refusal_note(kind, reason))
        return FilteredParts(tuple(shown), refused + surplus)

    def _filter_part(self, part: Part) -> Iterator[Part | _Refusal]:
        if isinstance(part, Text) or part.data is None:
            yield part
            return
        try:
            yield from self._check_part(part)
        except MediaError as error:
            yield _Refusal(refusal_note(type(part).__name__.lower(), str(error)))

    def _check_part(self, part: Medium | Resource) -> Iterator[Part]:
        data = part.data or b""
        if len(data) > self.limits.most_bytes:
            raise MediaError(f"{len(data)} bytes, more than {self.limits.most_bytes}")
        declared = part.mime or ""
        is_image_data = (sniff(data) or "").startswith("image/")
        if (
            isinstance(part, Image)
            or (isinstance(part, Resource) and declared.startswith("image/"))
            or (isinstance(part, Resource | Audio) and is_image_data)
        ):
            yield from self._check_image(Image(data, raster_type(data)))
        elif isinstance(part, Video):
            yield from self._check_video(as_video(data) if is_image_data else Video(data, declared))
        else:
            yield part

    def _check_image(self, image: Image) -> Iterator[Part]:
        """The image unchanged, unless it is animated or must be resized."""
        measure_image(image.data, self.limits.most_pixels)
        if _still_key(image) in self.store:
            yield self._still_image(image)
            return
        if (usable := with_usable_profile(image.data, self.limits.most_pixels)) is not image.data:
            image = Image(usable, image.mime)
        opened = open_image(image.data, self.limits.most_pixels)
        if not is_animated(opened):
            yield self._still_image(image)
        elif self.limits.animated == "video":
            yield from self._check_video(as_video(image.data))
        elif self.limits.animated == "frames":
            yield from self._frame_parts(image.data)
        else:
            first = self.store.get_or_create(("first", image.digest), lambda: encode_png(to_rgb(decode_image(opened))))
            yield self._still_image(first)
            yield Text("[the image is animated: this is its first frame]")

    def _still_image(self, image: Image) -> Image:
        """An image without animation, checked by decoding it once, in a size within the bounds."""
        max_pixels = self.limits.most_pixels
        checked = self.store.get_or_create(_still_key(image), lambda: _check_decodes(image, max_pixels))
        if (size := read_image_size(image.data)) == self._target_size(*size):
            return checked

        def resize() -> Image:
            return encode_png(self._resize(to_rgb(open_image(image.data, max_pixels))))

        return self.store.get_or_create(("resized", image.digest, self._pixel_bounds), resize)

    @property
    def _pixel_bounds(self) -> PixelBounds:
        limits = self.limits
        return PixelBounds(limits.min_pixels or 1, limits.max_pixels or limits.most_pixels, limits.factor)

    def _target_size(self, width: int, height: int) -> tuple[int, int]:
        """The same size if it is within the bounds, else the nearest that is."""
        bounds = self._pixel_bounds
        is_within = bounds.min_pixels <= width * height <= bounds.max_pixels
        return (width, height) if is_within else fit_size(width, height, bounds)

    def _resize(self, image: PILImage) -> PILImage:
        return resize_image(image, self._target_size(*image.size))

    def _check_video(self, video: Video) -> Iterator[Part]:
        limits = self.limits
        if limits.videos == "frames":
            yield from self._frame_parts(video.data)
            return
        if (sniff(video.data) or "").startswith("image/"):
            measure_image(video.data, limits.most_pixels)
        if limits.min_pixels or limits.max_pixels or self._max_frames < DEFAULT_SHOWN_FRAMES:
            key = ("fitted", video.mime, video.digest, limits)
            yield self.store.get_or_create(key, lambda: self._resample_video(video))
        else:
            yield self.store.get_or_create((Video, video.mime, video.digest), lambda: video)

    def _resample_video(self, video: Video) -> Video:
        """A video with no more frames, and no other sizes, than the limits allow: models see it as images."""
        if not self._max_frames:
            raise MediaError("at most 0 images of one result are shown")
        sampled = self._sample(video.data)
        images = [self._resize(image) for image in sampled.images]
        if sampled.total_frames <= self._max_frames and images[0].size == sampled.images[0].size:
            return video
        return encode_video(images, sampled.fps)

    @property
    def _max_frames(self) -> int:
        return min(self.limits.max_frames, self.limits.most_images)

    def _sample(self, data: bytes) -> SampledFrames:
        return sample_video(data, FrameSampling(self.limits.fps, 1, self._max_frames), self.limits.most_pixels)

    def _frame_parts(self, data: bytes) -> Iterator[Part]:
        """A video as images, after a text about their number."""
        sampled = self._sample(data)
        count = f"{len(sampled.images)} of its {sampled.total_frames} frames"
        yield Text(f"[a video of {sampled.duration_s:.3g} s: {count}, evenly spread]")
        for image in sampled.images:
            yield self._still_image(encode_png(image))


class _Refusal(NamedTuple):
    note: Text


def _still_key(image: Image) -> Hashable:
    """The store's key of an image that is neither damaged nor animated."""
    return Image, image.mime, image.digest


def _check_decodes(image: Image, max_pixels: int) -> Image:
    decode_image(open_image(image.data, max_pixels))
    return image


def _is_light(parts: Iterable[Part]) -> bool:
    """Whether checking the parts takes less time than starting a thread."""
    media = [part for part in parts if not isinstance(part, Text) and part.data is not None]
    images = [part.data for part in media if isinstance(part, Image)]
    if len(images) < len(media) or len(images) > LIGHT_IMAGES or sum(map(len, images)) > LIGHT_BYTES:
        return False
    try:
        return sum(width * height for width, height in map(read_image_size, images)) < LIGHT_PIXELS
    except MediaError:
        return False

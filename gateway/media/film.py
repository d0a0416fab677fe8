"""A film is frames at times; a policy sees so many of a second, spread evenly from the first to the last.

Animated GIF, WebP and PNG are read as they are. Other films need PyAV, which `pip install -e '.[video]'` brings.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

from gateway.media.kind import RASTERS, MediaError, sniff
from gateway.media.picture import MOST_PIXELS, Picture, decoded, opaque, opened

SHOWN = 16
"""Pictures that a policy is shown of a film, where nobody asks for fewer."""
MOST_FRAMES = 10_000
"""A film with more is refused."""
MOST_WORK_PIXELS = 1_000_000_000
"""Of all frames that are walked over; those of an animation build on each other."""
FRAME_MS = 100.0
"""Of a frame that does not say how long it stands, as browsers have it."""
_FORMS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-msvideo": "avi"}
"""Named to the decoder, since it would follow a playlist anywhere."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames are looked at."""

    fps: float = 2.0
    """Of each second, so many; together at least `min_frames` and at most `max_frames`."""
    min_frames: int = 4
    max_frames: int = 768
    frames: int | None = None
    """So many, however long the film is."""
    multiple: int = 1
    """Their number is a multiple of this, where there are enough."""

    def count(self, total: int, seconds: float) -> int:
        wanted = float(self.frames) if self.frames is not None else self._by_time(seconds)
        count = min(round(wanted / self.multiple), total // self.multiple) * self.multiple
        return max(1, count)

    def _by_time(self, seconds: float) -> float:
        return min(max(seconds * self.fps, self.min_frames), self.max_frames)


@dataclass(frozen=True, slots=True)
class Seen:
    """The frames of a film that were looked at."""

    pictures: tuple[Picture, ...]
    places: tuple[int, ...]
    """Which of the film's frames they are."""
    total: int
    seconds: float

    @property
    def fps(self) -> float:
        """Of those that were looked at."""
        return len(self.pictures) / self.seconds if self.seconds else 0.0


def frames(data: bytes, sampling: Sampling, most_pixels: int = MOST_PIXELS) -> Seen:
    """Raises MediaError for what is no film, is damaged, or would be more pixels than may be decoded."""
    kind = sniff(data)
    if kind in RASTERS:
        return _of_animation(data, sampling, most_pixels)
    if kind in _FORMS:
        return _of_file(data, _FORMS[kind], sampling, most_pixels)
    raise MediaError(f"{len(data)} bytes that are no film" + (f", but {kind}" if kind else ""))


def of_pictures(pictures: Sequence[Picture], fps: float, sampling: Sampling) -> Seen:
    """Frames that are at hand, as many as are wanted of them."""
    starts = [place / fps for place in range(len(pictures))]
    places = _spread(starts, len(pictures) / fps, sampling)
    return Seen(tuple(pictures[place] for place in places), tuple(places), len(pictures), len(pictures) / fps)


def _of_animation(data: bytes, sampling: Sampling, most_pixels: int) -> Seen:
    """Two walks: the times of all frames first, then the pixels of those that are wanted."""
    durations = [duration for duration, _ in _walk(opened(data, most_pixels))]
    seconds = sum(durations)
    places = _spread([0.0, *accumulate(durations[:-1])], seconds, sampling)
    width, height = opened(data, most_pixels).size
    if width * height * len(places) > most_pixels:
        raise MediaError(f"{len(places)} frames of {width}x{height} pixels, together more than {most_pixels}")
    wanted = set(places)
    walk = enumerate(islice(_walk(opened(data, most_pixels)), places[-1] + 1))
    seen = {place: opaque(frame).copy() for place, (_, frame) in walk if place in wanted}
    return Seen(tuple(seen[place] for place in places), tuple(places), len(durations), seconds)


def _walk(picture: Picture) -> Iterator[tuple[float, Picture]]:
    """Each frame with the seconds that it stands. They build on each other, so all are decoded."""
    width, height = picture.size
    most = min(MOST_FRAMES, max(1, MOST_WORK_PIXELS // (width * height)))
    for place in range(most):
        try:
            picture.seek(place)
        except EOFError:
            return
        except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
            raise MediaError(f"not a readable film: {error}") from error
        frame = decoded(picture)
        yield float(frame.info.get("duration") or FRAME_MS) / 1000, frame
    raise MediaError(f"a film of {width}x{height} pixels with {most} frames or more")


def _spread(starts: Sequence[float], seconds: float, sampling: Sampling) -> list[int]:
    """The frames that stand at evenly spread times. A frame that stands long may be met more than once."""
    count = sampling.count(len(starts), seconds)
    last = starts[-1]
    # To the nearest frame, where all stand equally long; and to the one that stands, where one stands much longer.
    half = min((after - before for before, after in pairwise(starts)), default=0.0) / 2
    times = [last * place / (count - 1) if count > 1 else 0.0 for place in range(count)]
    return [bisect_right(starts, time + half * 0.999) - 1 for time in times]


def _of_file(data: bytes, form: str, sampling: Sampling, most_pixels: int) -> Seen:
    try:
        import av  # an extra: most films are frames already
    except ImportError as error:
        raise MediaError(f"a film as {form} is decoded by PyAV: pip install -e '.[video]'") from error
    try:
        with av.open(io.BytesIO(data), format=form) as container:
            return _decoded(container, sampling, most_pixels)
    except MediaError:
        raise
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise MediaError(f"not a readable film: {error}") from error


def _decoded(container: Any, sampling: Sampling, most_pixels: int) -> Seen:
    stream = next(iter(container.streams.video), None)
    if stream is None:
        raise MediaError("a film without pictures")
    rate = float(stream.average_rate or 1000 / FRAME_MS)
    total = min(stream.frames or round(float((container.duration or 0) / 1e6) * rate) or 1, MOST_FRAMES)
    places = _spread([place / rate for place in range(total)], total / rate, sampling)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height * len(places) > most_pixels:
        raise MediaError(f"{len(places)} frames of {width}x{height} pixels, together more than {most_pixels}")
    wanted = set(places)
    walk = enumerate(islice(container.decode(stream), places[-1] + 1))
    seen = {place: frame.to_image() for place, frame in walk if place in wanted}
    if not seen:
        raise MediaError("a film without pictures")
    places = [place for place in places if place in seen]
    return Seen(tuple(seen[place] for place in places), tuple(places), total, total / rate)

"""Samples frames of a video, evenly spread over its time.

Animated GIF, WebP and PNG are decoded by Pillow. Other videos need PyAV: `pip install 'mtrl-rl[video]'`.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

from gateway.media.image import MAX_PIXELS, PILImage, decode_image, open_image, to_rgb
from gateway.media.sniff import RASTER_TYPES, MediaError, sniff

DEFAULT_SHOWN_FRAMES = 16
"""Frames of a video that a policy is shown by default."""
MAX_VIDEO_FRAMES = 10_000
"""A video with more frames is refused."""
MAX_DECODED_PIXELS = 1_000_000_000
"""Limit on the pixels of all decoded frames of an animation: each frame builds on the one before."""
DEFAULT_FRAME_MS = 100.0
"""Duration of a frame that states none, as in browsers."""
_DEMUXERS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-msvideo": "avi"}
"""PyAV's format for each type. It is always named: PyAV would follow a playlist to any address."""


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """How many frames are sampled from a video."""

    fps: float = 2.0
    """Sampled frames per second of video; at least `min_frames` and at most `max_frames` in all."""
    min_frames: int = 4
    max_frames: int = 768
    frame_count: int | None = None
    """A fixed number of frames, whatever the duration; replaces the three above."""
    multiple_of: int = 1
    """The number of frames is a multiple of this, if the video has enough."""

    def choose_count(self, total_frames: int, duration_s: float) -> int:
        """How many of a video's frames are sampled, at least one."""
        by_duration = min(max(duration_s * self.fps, self.min_frames), self.max_frames)
        wanted = by_duration if self.frame_count is None else float(self.frame_count)
        count = min(round(wanted / self.multiple_of), total_frames // self.multiple_of) * self.multiple_of
        return max(1, count)


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """Frames sampled from a video."""

    images: tuple[PILImage, ...]
    indices: tuple[int, ...]
    """The index of each in the video."""
    total_frames: int
    duration_s: float

    @property
    def fps(self) -> float:
        """Sampled frames per second."""
        return len(self.images) / self.duration_s if self.duration_s else 0.0


def sample_video(data: bytes, sampling: FrameSampling, max_pixels: int = MAX_PIXELS) -> SampledFrames:
    """Samples an encoded video; raises MediaError for other or damaged data, or for more than `max_pixels` together."""
    mime = sniff(data)
    if mime in RASTER_TYPES:
        return _sample_animation(data, sampling, max_pixels)
    if mime in _DEMUXERS:
        return _sample_video_file(data, _DEMUXERS[mime], sampling, max_pixels)
    raise MediaError(f"{len(data)} bytes that are not a video" + (f", but {mime}" if mime else ""))


def sample_images(frames: Sequence[PILImage], fps: float, sampling: FrameSampling) -> SampledFrames:
    """Samples decoded frames that follow each other at a constant rate."""
    starts = [index / fps for index in range(len(frames))]
    indices = _spread_indices(starts, len(frames) / fps, sampling)
    return SampledFrames(tuple(frames[index] for index in indices), tuple(indices), len(frames), len(frames) / fps)


def _sample_animation(data: bytes, sampling: FrameSampling, max_pixels: int) -> SampledFrames:
    """Decodes twice: for the durations of all frames, then for the pixels of the sampled ones."""
    durations = [duration for duration, _ in _iterate_frames(open_image(data, max_pixels))]
    duration_s = sum(durations)
    indices = _spread_indices([0.0, *accumulate(durations[:-1])], duration_s, sampling)
    width, height = open_image(data, max_pixels).size
    _check_total_pixels(len(indices), width, height, max_pixels)
    wanted = set(indices)
    frames = enumerate(islice(_iterate_frames(open_image(data, max_pixels)), indices[-1] + 1))
    images = {index: to_rgb(frame).copy() for index, (_, frame) in frames if index in wanted}
    return SampledFrames(tuple(images[index] for index in indices), tuple(indices), len(durations), duration_s)


def _iterate_frames(image: PILImage) -> Iterator[tuple[float, PILImage]]:
    """Each frame with its duration in seconds. Frames build on each other, so every one is decoded."""
    width, height = image.size
    max_frames = min(MAX_VIDEO_FRAMES, max(1, MAX_DECODED_PIXELS // (width * height)))
    for index in range(max_frames):
        try:
            image.seek(index)
        except EOFError:
            return
        except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
            raise MediaError(f"not a readable video: {error}") from error
        frame = decode_image(image)
        yield float(frame.info.get("duration") or DEFAULT_FRAME_MS) / 1000, frame
    raise MediaError(f"a video of {width}x{height} pixels with {max_frames} frames or more")


def _spread_indices(starts: Sequence[float], duration_s: float, sampling: FrameSampling) -> list[int]:
    """Indices of the frames shown at evenly spread times; a long frame may be repeated."""
    count = sampling.choose_count(len(starts), duration_s)
    last = starts[-1]
    # The nearest frame where durations are equal; the frame on display where one is much longer than the others.
    half = min((after - before for before, after in pairwise(starts)), default=0.0) / 2
    times = [last * position / (count - 1) if count > 1 else 0.0 for position in range(count)]
    return [bisect_right(starts, time + half * 0.999) - 1 for time in times]


def _sample_video_file(data: bytes, demuxer: str, sampling: FrameSampling, max_pixels: int) -> SampledFrames:
    try:
        import av  # an optional dependency: most tools return frames
    except ImportError as error:
        raise MediaError(f"{demuxer} videos are decoded by PyAV: pip install 'mtrl-rl[video]'") from error
    try:
        with av.open(io.BytesIO(data), format=demuxer) as container:
            return _sample_container(container, sampling, max_pixels)
    except MediaError:
        raise
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise MediaError(f"not a readable video: {error}") from error


def _sample_container(container: Any, sampling: FrameSampling, max_pixels: int) -> SampledFrames:
    stream = next(iter(container.streams.video), None)
    if stream is None:
        raise MediaError("a video without frames")
    rate = float(stream.average_rate or 1000 / DEFAULT_FRAME_MS)
    total = min(stream.frames or round(float((container.duration or 0) / 1e6) * rate) or 1, MAX_VIDEO_FRAMES)
    indices = _spread_indices([index / rate for index in range(total)], total / rate, sampling)
    width, height = stream.codec_context.width, stream.codec_context.height
    _check_total_pixels(len(indices), width, height, max_pixels)
    wanted = set(indices)
    frames = enumerate(islice(container.decode(stream), indices[-1] + 1))
    images = {index: frame.to_image() for index, frame in frames if index in wanted}
    if not images:
        raise MediaError("a video without frames")
    indices = [index for index in indices if index in images]
    return SampledFrames(tuple(images[index] for index in indices), tuple(indices), total, total / rate)


def _check_total_pixels(count: int, width: int, height: int, max_pixels: int) -> None:
    if width * height * count > max_pixels:
        raise MediaError(f"{count} frames of {width}x{height} pixels, together more than {max_pixels}")

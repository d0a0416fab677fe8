"""`process_image` and `process_video`: images and video frames in sizes that Qwen-VL models take, for tools' own code.

Sides are multiples of twice the patch size: 28 for Qwen2-VL and Qwen2.5-VL (patch 14), 32 for Qwen3-VL (patch 16).
A video is a list of frames; `ToolResponse(image=[...], video=[...])` takes both results as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.media.image import PILImage, frames_from_array, resize_image, to_rgb
from gateway.media.sniff import MediaError
from gateway.media.to_parts import load_image, to_media
from gateway.media.video import DEFAULT_FRAME_MS, FrameSampling, SampledFrames, sample_images, sample_video
from gateway.wire import is_array

MAX_ASPECT_RATIO = 200
"""A more elongated image is refused, as by the models' own processors."""
IMAGE_TOKENS = (4, 16_384)
"""Default range of tokens for one image."""
FRAME_TOKENS = (128, 768)
"""Default range of tokens for one frame of a video."""
VIDEO_TOKENS = 115_200
"""Default limit on the tokens of all frames of a video."""
FRAME_MULTIPLE = 2
"""A video has a multiple of this many frames, since models merge them in pairs."""
VIDEO_KEYS = (
    '{"video": path, bytes or frames, "fps" or "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels"}'
)


class PixelBounds(NamedTuple):
    """Limits on an image's pixels, and the factor of which its sides are multiples."""

    min_pixels: int
    max_pixels: int
    factor: int


def fit_size(width: int, height: int, bounds: PixelBounds) -> tuple[int, int]:
    """The nearest size within the bounds with the same aspect ratio (`smart_resize` of Qwen-VL's processor)."""
    factor = bounds.factor
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MediaError(f"{width}x{height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other")
    new_width, new_height = _limit_aspect(round_to_multiple(width, factor), round_to_multiple(height, factor))
    if new_width * new_height > bounds.max_pixels:
        shrink = math.sqrt(width * height / bounds.max_pixels)
        sides = (max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height))
        return _limit_aspect(*sides)
    if new_width * new_height < bounds.min_pixels:
        grow = math.sqrt(bounds.min_pixels / (width * height))
        new_width, new_height = (math.ceil(side * grow / factor) * factor for side in (width, height))
    return new_width, new_height


def _limit_aspect(width: int, height: int) -> tuple[int, int]:
    """Shortens the long side where rounding made the short one too short for it."""
    return min(width, MAX_ASPECT_RATIO * height), min(height, MAX_ASPECT_RATIO * width)


def round_to_multiple(side: int, factor: int) -> int:
    """The nearest multiple of the factor above zero."""
    return max(factor, round(side / factor) * factor)


def process_image(image: Mapping[str, Any] | PILImage, image_patch_size: int = 14) -> PILImage:
    """Converts an image to RGB in a size that the model takes. A PIL image keeps its size.

    In a mapping, `image`, `image_url` or `bytes` is the image: a PIL image, an array, bytes, a path or a data URI;
    `resized_height` with `resized_width`, or `min_pixels` and `max_pixels`, determine the size.
    """
    if not isinstance(image, Mapping):
        return to_rgb(load_image(image))
    sources = [image[key] for key in ("image", "image_url", "bytes") if image.get(key) is not None]
    if len(sources) != 1:
        raise MediaError(
            f"an image needs exactly one of `image`, `image_url` and `bytes`, but there are {len(sources)}"
        )
    source = sources[0].get("url") if isinstance(sources[0], Mapping) else sources[0]
    rgb = to_rgb(load_image(source))
    return resize_image(rgb, _target_size(rgb, image, _pixel_bounds(image, IMAGE_TOKENS, image_patch_size)))


def process_video(  # noqa: PLR0913 - verl's signature
    video: Mapping[str, Any],
    image_patch_size: int = 14,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int | None = None,
    fps_max_frames: int | None = None,
    return_video_sample_fps: bool = False,
    return_video_metadata: bool = False,
) -> Any:
    """Samples a video's frames in a size that the model takes.

    `video["video"]` is a path, bytes, a data URI or an array of four axes; or a list of frames, each as `process_image`
    takes it, of which all are used. `nframes` or `fps` in the mapping override the arguments. The frames come in a
    tuple with their metadata (`fps`, `frames_indices`, `total_num_frames`) if `return_video_metadata`, and in a tuple
    with the sampled frames per second if `return_video_sample_fps`.
    """
    if not isinstance(video, Mapping) or "video" not in video:
        raise MediaError(f"a video needs the keys {VIDEO_KEYS}")
    arguments = {"nframes": nframes, "fps": fps, "min_frames": fps_min_frames, "max_frames": fps_max_frames}
    if not {"nframes", "fps"} & {key for key, value in video.items() if value is not None}:
        video = {**{key: value for key, value in arguments.items() if value is not None}, **video}
    if video.get("nframes") is not None and video.get("fps") is not None:
        raise MediaError("`nframes` and `fps` both determine the number of frames: give one of them")
    sampled = _load_frames(video)
    bounds = _pixel_bounds(video, FRAME_TOKENS, image_patch_size)
    if "max_pixels" not in video:
        total_pixels = int(video.get("total_pixels") or VIDEO_TOKENS * (2 * image_patch_size) ** 2)
        per_frame = total_pixels * FRAME_MULTIPLE // len(sampled.images)
        bounds = bounds._replace(max_pixels=max(min(bounds.max_pixels, per_frame), int(bounds.min_pixels * 1.05)))
    size = _target_size(sampled.images[0], video, bounds)
    frames: Any = [resize_image(to_rgb(image), size) for image in sampled.images]
    if return_video_metadata:
        rate = sampled.total_frames / sampled.duration_s if sampled.duration_s else 0.0
        metadata = {"fps": rate, "frames_indices": list(sampled.indices), "total_num_frames": sampled.total_frames}
        frames = (frames, metadata)
    return (frames, sampled.fps) if return_video_sample_fps else frames


def _load_frames(video: Mapping[str, Any]) -> SampledFrames:
    source = video["video"]
    rate = float(video.get("sample_fps") or video.get("fps") or 1000 / DEFAULT_FRAME_MS)
    if isinstance(source, list | tuple):
        # A list of frames was sampled by its author.
        images = [process_image(frame) for frame in source]
        if not images:
            raise MediaError("a video without frames")
        images += images[-1:] * (-len(images) % FRAME_MULTIPLE)
        return SampledFrames(tuple(images), tuple(range(len(images))), len(images), len(images) / rate)
    if isinstance(source, PILImage):
        raise MediaError("a single image is not a video: give a list of frames, or use `process_image`")
    if is_array(source):
        return sample_images(frames_from_array(source), rate, _frame_sampling(video))
    return sample_video(to_media(source).data, _frame_sampling(video))


def _frame_sampling(video: Mapping[str, Any]) -> FrameSampling:
    defaults = FrameSampling(multiple_of=FRAME_MULTIPLE)
    return FrameSampling(
        fps=float(video.get("fps") or defaults.fps),
        min_frames=int(video.get("min_frames") or defaults.min_frames),
        max_frames=int(video.get("max_frames") or defaults.max_frames),
        frame_count=None if video.get("nframes") is None else int(video["nframes"]),
        multiple_of=FRAME_MULTIPLE,
    )


def _pixel_bounds(options: Mapping[str, Any], tokens: tuple[int, int], patch_size: int) -> PixelBounds:
    factor = 2 * patch_size
    min_pixels, max_pixels = (count * factor**2 for count in tokens)
    bounds = PixelBounds(
        int(options.get("min_pixels") or min_pixels), int(options.get("max_pixels") or max_pixels), factor
    )
    if bounds.min_pixels > bounds.max_pixels:
        if options.get("min_pixels"):
            raise MediaError(f"`min_pixels` {bounds.min_pixels} is more than `max_pixels` {bounds.max_pixels}")
        bounds = bounds._replace(min_pixels=bounds.max_pixels)
    return bounds


def _target_size(image: PILImage, options: Mapping[str, Any], bounds: PixelBounds) -> tuple[int, int]:
    """Width and height, multiples of the factor: those of the options, or the image's own within the bounds."""
    height, width = options.get("resized_height"), options.get("resized_width")
    if (height is None) != (width is None):
        raise MediaError("`resized_height` and `resized_width` belong together: give both")
    if height is not None and width is not None:
        return fit_size(int(width), int(height), bounds)
    return fit_size(*image.size, bounds)

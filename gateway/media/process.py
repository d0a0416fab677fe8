"""Pictures and films made ready by a tool's own code, in the words that vision trainers know.

Sides are multiples of twice the patch: 28 for Qwen2-VL and Qwen2.5-VL (patch 14), 32 for Qwen3-VL (patch 16).
A film is its frames, as a list of pictures; `ToolResponse(image=[...], video=[...])` takes both as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.media import film
from gateway.media.film import FRAME_MS, Sampling, Seen
from gateway.media.kind import MediaError
from gateway.media.picture import Picture, frames_of_array, opaque, resized
from gateway.media.sizes import Bounds, fitted
from gateway.media.take import to_medium, to_picture
from gateway.plain import is_array

IMAGE_IDS = (4, 16_384)
"""A picture is shown as at least and at most so many ids, where nothing else is asked for."""
FRAME_IDS = (128, 768)
"""And a frame of a film."""
FILM_IDS = 115_200
"""And all frames of a film together."""
OF_FRAMES = 2
"""A film has a multiple of so many frames, since a model sees them in pairs."""
FORM = '{"video": path, bytes or frames, "fps" or "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels"}'


def process_image(image: Mapping[str, Any] | Picture, image_patch_size: int = 14) -> Picture:
    """In red, green and blue, in a size that the model takes. A picture of Pillow's own keeps its size.

    Of a mapping, `image`, `image_url` or `bytes` is the picture: of Pillow's, an array, bytes, a path or a data URI;
    `resized_height` with `resized_width`, or `min_pixels` and `max_pixels`, say how large it becomes.
    """
    if not isinstance(image, Mapping):
        return opaque(to_picture(image))
    named = [image[key] for key in ("image", "image_url", "bytes") if image.get(key) is not None]
    if len(named) != 1:
        raise MediaError(f"a picture is given as one of `image`, `image_url` and `bytes`, and here are {len(named)}")
    shown = named[0].get("url") if isinstance(named[0], Mapping) else named[0]
    picture = opaque(to_picture(shown))
    return resized(picture, _sides(picture, image, _bounds(image, IMAGE_IDS, image_patch_size)))


def process_video(  # noqa: PLR0913 - the arguments are those that trainers know
    video: Mapping[str, Any],
    image_patch_size: int = 14,
    nframes: int | None = None,
    fps: float | None = None,
    fps_min_frames: int | None = None,
    fps_max_frames: int | None = None,
    return_video_sample_fps: bool = False,
    return_video_metadata: bool = False,
) -> Any:
    """The frames of a film that are looked at, in sizes that the model takes.

    `video["video"]` is a path, bytes, a data URI or an array of four axes; or frames, each as `process_image` takes it,
    which are all kept. `nframes` or `fps` in the mapping go before the arguments. With `return_video_metadata` the
    frames come with `fps`, `frames_indices`, `total_num_frames`; with `return_video_sample_fps`, with frames a second.
    """
    if not isinstance(video, Mapping) or "video" not in video:
        raise MediaError(f"a film is given as {FORM}")
    asked = {"nframes": nframes, "fps": fps, "min_frames": fps_min_frames, "max_frames": fps_max_frames}
    if not {"nframes", "fps"} & {key for key, value in video.items() if value is not None}:
        video = {**{key: value for key, value in asked.items() if value is not None}, **video}
    if video.get("nframes") is not None and video.get("fps") is not None:
        raise MediaError("`nframes` and `fps` both say how many frames there are: give one of them")
    seen = _seen(video)
    bounds = _bounds(video, FRAME_IDS, image_patch_size)
    if "max_pixels" not in video:
        whole = FILM_IDS * (2 * image_patch_size) ** 2
        together = int(video.get("total_pixels") or whole) * OF_FRAMES // len(seen.pictures)
        bounds = bounds._replace(max_pixels=max(min(bounds.max_pixels, together), int(bounds.min_pixels * 1.05)))
    sides = _sides(seen.pictures[0], video, bounds)
    frames: Any = [resized(opaque(picture), sides) for picture in seen.pictures]
    if return_video_metadata:
        rate = seen.total / seen.seconds if seen.seconds else 0.0
        frames = (frames, {"fps": rate, "frames_indices": list(seen.places), "total_num_frames": seen.total})
    return (frames, seen.fps) if return_video_sample_fps else frames


def _seen(video: Mapping[str, Any]) -> Seen:
    shown = video["video"]
    rate = float(video.get("sample_fps") or video.get("fps") or 1000 / FRAME_MS)
    if isinstance(shown, list | tuple):
        # Whoever chose the frames has chosen how many.
        pictures = [process_image(frame) for frame in shown]
        if not pictures:
            raise MediaError("a film without frames")
        pictures += pictures[-1:] * (-len(pictures) % OF_FRAMES)
        return Seen(tuple(pictures), tuple(range(len(pictures))), len(pictures), len(pictures) / rate)
    if isinstance(shown, Picture):
        raise MediaError("a single picture is no film: give a list of frames, or use `process_image`")
    if is_array(shown):
        return film.of_pictures(frames_of_array(shown), rate, _sampling(video))
    return film.frames(to_medium(shown).data, _sampling(video))


def _sampling(video: Mapping[str, Any]) -> Sampling:
    known = Sampling(multiple=OF_FRAMES)
    return Sampling(
        fps=float(video.get("fps") or known.fps),
        min_frames=int(video.get("min_frames") or known.min_frames),
        max_frames=int(video.get("max_frames") or known.max_frames),
        frames=None if video.get("nframes") is None else int(video["nframes"]),
        multiple=OF_FRAMES,
    )


def _bounds(asked: Mapping[str, Any], ids: tuple[int, int], patch: int) -> Bounds:
    factor = 2 * patch
    least, most = (count * factor**2 for count in ids)
    bounds = Bounds(int(asked.get("min_pixels") or least), int(asked.get("max_pixels") or most), factor)
    if bounds.min_pixels > bounds.max_pixels:
        if asked.get("min_pixels"):
            raise MediaError(f"`min_pixels` {bounds.min_pixels} is more than `max_pixels` {bounds.max_pixels}")
        bounds = bounds._replace(min_pixels=bounds.max_pixels)
    return bounds


def _sides(picture: Picture, asked: Mapping[str, Any], bounds: Bounds) -> tuple[int, int]:
    """Width and height: as asked for, or in the picture's own aspect; multiples of the factor in either case."""
    height, width = asked.get("resized_height"), asked.get("resized_width")
    if (height is None) != (width is None):
        raise MediaError("`resized_height` and `resized_width` go together: give both")
    if height is not None and width is not None:
        return fitted(int(width), int(height), bounds)
    return fitted(*picture.size, bounds)

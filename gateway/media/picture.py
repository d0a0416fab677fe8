"""The one door to Pillow: what is measured may come in, as the type that its bytes told, and nothing else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image as Pillow

from gateway.media.header import size
from gateway.media.kind import MediaError, raster
from gateway.types import Image, Video

MOST_PIXELS = 64_000_000
"""A larger picture is refused: decoding it would cost a quarter of a gigabyte."""
UNWARNED_PIXELS = 89_478_485
"""Beyond these Pillow warns, and beyond twice as many it refuses."""
Picture = Pillow.Image
_KEPT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_CHANNELS = (1, 3, 4)


def measured(data: bytes, most_pixels: int = MOST_PIXELS) -> tuple[int, int]:
    """Width and height, from the header alone; raises MediaError for more pixels than may be decoded."""
    width, height = size(data)
    _bounded(width, height, most_pixels)
    return width, height


def opened(data: bytes, most_pixels: int = MOST_PIXELS) -> Picture:
    """A picture, measured and not yet decoded."""
    measured(data, most_pixels)
    form = raster(data).removeprefix("image/").upper()
    try:
        picture = Pillow.open(io.BytesIO(data), formats=(form,))
        _bounded(*picture.size, most_pixels)  # A frame may be larger than the header says.
    except MediaError:
        raise
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise _unreadable(error) from error
    return picture


def decoded(picture: Picture) -> Picture:
    """The same, with its pixels at hand; for what moves, those of the frame that it stands at."""
    try:
        picture.load()
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise _unreadable(error) from error
    return picture


def moves(picture: Picture) -> bool:
    """Whether there are further frames; a photograph with a second one for the other eye does not move."""
    try:
        return picture.format in ("GIF", "PNG", "WEBP") and bool(getattr(picture, "is_animated", False))
    except Exception:  # boundary: over hostile bytes a decoder may raise anything; the frame that is there counts
        return False


def opaque(picture: Picture) -> Picture:
    """In red, green and blue; what shines through is white."""
    if picture.mode == "RGB":
        return picture
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        over = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", over.size, "white"), over).convert("RGB")
    return picture.convert("RGB")


def resized(picture: Picture, sides: tuple[int, int]) -> Picture:
    return picture if picture.size == sides else picture.resize(sides, Pillow.Resampling.BICUBIC)


def encoded(picture: Picture) -> Image:
    """As PNG, which loses nothing and is the same for the same pixels."""
    if picture.mode not in _KEPT_MODES:
        picture = picture.convert("RGB")
    out = io.BytesIO()
    picture.save(out, format="PNG")
    return Image(out.getvalue(), "image/png")


def encoded_film(frames: Sequence[Picture], fps: float) -> Video:
    """Frames as one animated picture, which loses nothing."""
    if not frames:
        raise MediaError("a film without frames")
    first, *rest = (opaque(frame) for frame in frames)
    if odd := next((frame for frame in rest if frame.size != first.size), None):
        raise MediaError(f"a film with frames of {first.size} and of {odd.size}")
    out = io.BytesIO()
    duration_ms = max(1, round(1000 / fps))
    first.save(out, format="WEBP", save_all=True, append_images=rest, lossless=True, duration=duration_ms)
    return Video(out.getvalue(), "video/webp")


def is_picture(value: Any) -> bool:
    return isinstance(value, Picture) or is_array(value)


def is_array(value: Any) -> bool:
    """An array of numpy's, or of a kind like it, or a tensor; there is no need to know their libraries."""
    return hasattr(value, "__array_interface__") or (hasattr(value, "detach") and hasattr(value, "numpy"))


def of_value(value: Any) -> Picture:
    """A picture of Pillow's, or an array: rows, columns and channels, or channels first."""
    if isinstance(value, Picture):
        return value
    value = _as_bytes(_array(value))
    shape = _shape(value)
    try:
        if len(shape) == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
            value = value.transpose(1, 2, 0)
        if len(shape) == 3 and _shape(value)[-1] == 1:
            value = value[:, :, 0]
        return Pillow.fromarray(value)
    except (TypeError, ValueError, KeyError) as error:
        raise MediaError(f"an array of shape {shape} that is no picture: {error}") from error


def frames_of_array(value: Any) -> list[Picture]:
    """Frames from an array of four axes, the first of which is time."""
    value = _as_bytes(_array(value))
    if len(_shape(value)) != 4:
        raise MediaError(
            f"an array of shape {_shape(value)}, which is no film: it needs frames, rows, columns, channels"
        )
    return [of_value(frame) for frame in value]


def _array(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.__array_interface__["shape"])


def _as_bytes(value: Any) -> Any:
    """Numbers from 0 to 255, or shares from 0 to 1, as bytes."""
    kind = str(value.__array_interface__["typestr"])[1:]
    if kind in ("u1", "u2"):  # Pillow has pictures of the latter as well.
        return value
    low, high = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
    if not (low >= 0 and high <= 255):  # nor where a number is none
        raise MediaError(f"an array with values from {low:g} to {high:g}, where a picture has 0 to 255, or 0 to 1")
    shares = kind[0] == "b" or (kind[0] == "f" and high <= 1)
    return (value * 255.0 if shares else value * 1.0).round().astype("uint8")


def _bounded(width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise MediaError(f"{width}x{height} pixels, more than {most_pixels}")


def _unreadable(error: Exception) -> MediaError:
    told = str(error).splitlines()
    return MediaError(f"not a readable picture: {told[0][:200] if told else type(error).__name__}")
